// What the dashboard uses of Preact, its hooks, signals and htm, as one file without build step for its modules.
export { h, render, Fragment, createRef, createContext } from 'preact';
export { useState, useEffect, useLayoutEffect, useMemo, useRef, useCallback, useContext } from 'preact/hooks';
export { signal, computed, effect, batch, useSignal, useComputed } from '@preact/signals';
import { h } from 'preact';
import htm from 'htm';

export const html = htm.bind(h);
