// Data of a page: read when it is shown, again when asked, and again by itself after a temporary failure.

import { useEffect, useRef, useState } from '../vendor/preact.js';
import { ApiError } from './api.js';

const FIRST_RETRY_MS = 1000;
const LAST_RETRY_MS = 15_000;

/**
 * @template T
 * @typedef {{ data: T | undefined, error: ApiError | null, isCurrent: boolean, reload: () => void }} Resource
 */

/**
 * Read data, and again when `key` changes. While new data is read, the data before stays if `keep` is set.
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} read
 * @param {string | null} key Identifies the request; null reads nothing.
 * @param {{ keep?: boolean, everyMs?: number }} [options] `everyMs`: read again after this time, in a visible tab.
 * @returns {Resource<T>}
 */
export function useResource(read, key, { keep = true, everyMs } = {}) {
  const [state, setState] = useState(
    /** @type {{ key: string | null, data: T | undefined, error: ApiError | null }} */ ({
      key: null,
      data: undefined,
      error: null,
    }),
  );
  const [reloadCount, setReloadCount] = useState(0);
  const latest = useRef(read);
  latest.current = read;

  useEffect(() => {
    if (key === null) return undefined;
    const controller = new AbortController();
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    let tries = 0;
    const readData = async () => {
      try {
        const data = await latest.current(controller.signal);
        if (controller.signal.aborted) return;
        tries = 0;
        setState({ key, data, error: null });
        if (everyMs) timer = setTimeout(whenVisible, everyMs);
      } catch (error) {
        if (controller.signal.aborted) return;
        if (!(error instanceof ApiError)) throw error;
        setState((before) => ({ key, data: before.key === key || keep ? before.data : undefined, error }));
        if (!error.isTemporary) return;
        timer = setTimeout(whenVisible, Math.min(FIRST_RETRY_MS * 2 ** tries, LAST_RETRY_MS));
        tries += 1;
      }
    };
    const whenVisible = () => {
      if (!document.hidden) readData();
      else document.addEventListener('visibilitychange', whenVisible, { once: true });
    };
    readData();
    return () => {
      controller.abort();
      clearTimeout(timer);
      document.removeEventListener('visibilitychange', whenVisible);
    };
  }, [key, reloadCount, everyMs]);

  const isCurrent = state.key === key;
  return {
    data: isCurrent || keep ? state.data : undefined,
    error: isCurrent ? state.error : null,
    isCurrent,
    reload: () => setReloadCount((count) => count + 1),
  };
}

/**
 * State of a request that a person starts: at most one at a time, with its error.
 * @returns {{
 *   busy: boolean, error: ApiError | null, run: (work: () => Promise<void>) => Promise<void>, clear: () => void,
 * }}
 */
export function useAction() {
  const [state, setState] = useState({ busy: false, error: /** @type {ApiError | null} */ (null) });
  const isMounted = useRef(true);
  // Beside the state, which a second click in the same moment does not see yet.
  const isBusy = useRef(false);
  useEffect(() => () => void (isMounted.current = false), []);
  return {
    ...state,
    clear: () => setState({ busy: false, error: null }),
    run: async (work) => {
      if (isBusy.current) return;
      isBusy.current = true;
      setState({ busy: true, error: null });
      try {
        await work();
        if (isMounted.current) setState({ busy: false, error: null });
      } catch (error) {
        const failure =
          error instanceof ApiError
            ? error
            : new ApiError(0, 'internal', `This page failed (${error}). Reload it, and try again.`);
        if (isMounted.current) setState({ busy: false, error: failure });
        if (failure !== error) throw error;
      } finally {
        isBusy.current = false;
      }
    },
  };
}

/**
 * Current time in milliseconds, renewed while a component shows it.
 * @param {number} everyMs
 */
export function useNow(everyMs = 1000) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => document.hidden || setNow(Date.now()), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return now;
}

/**
 * The value, once it has not changed for a while.
 * @template T
 * @param {T} value
 * @param {number} ms
 */
export function useSettled(value, ms) {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), ms);
    return () => clearTimeout(timer);
  }, [value, ms]);
  return settled;
}
