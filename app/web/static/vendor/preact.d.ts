// Types of static/vendor/preact.js, which is built from vendor_entry.js; for `make lint` only.
import type { VNode } from 'preact';

export { h, render, Fragment, createRef, createContext } from 'preact';
export { useState, useEffect, useLayoutEffect, useMemo, useRef, useCallback, useContext } from 'preact/hooks';
export { signal, computed, effect, batch, useSignal, useComputed } from '@preact/signals';
export function html(strings: TemplateStringsArray, ...values: unknown[]): VNode;
