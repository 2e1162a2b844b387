// Addresses: the page and its parameters, from the path, and the state of its view, from the query.

import { computed, signal, useEffect, useRef } from '../vendor/preact.js';
import { matchRoute } from './addresses.js';

const address = signal(typeof location === 'undefined' ? '/' : location.pathname + location.search);

/** Path of the address. */
export const path = computed(() => address.value.split('?')[0]);

/** Query of the address. */
export const query = computed(() => new URLSearchParams(address.value.split('?')[1] ?? ''));

/**
 * Show another address.
 * @param {string} to Path with query.
 * @param {{ replace?: boolean }} [how]
 */
export function navigate(to, { replace = false } = {}) {
  if (to === address.value) return;
  history[replace ? 'replaceState' : 'pushState'](null, '', to);
  address.value = location.pathname + location.search;
}

/**
 * Navigation for what follows a response: it does nothing once the component that uses it is no longer shown, since the
 * person has closed it or is on another page by then.
 * @returns {typeof navigate}
 */
export function useNavigation() {
  const isShown = useRef(true);
  useEffect(() => () => void (isShown.current = false), []);
  return (to, how) => {
    if (isShown.current) navigate(to, how);
  };
}

/**
 * Change parameters of the query; null or an empty text removes one. The view changes, the history does not grow.
 * @param {Record<string, string | number | string[] | null | undefined>} changes
 */
export function setQuery(changes) {
  const next = new URLSearchParams(query.value);
  for (const [name, value] of Object.entries(changes)) {
    next.delete(name);
    for (const item of Array.isArray(value) ? value : [value])
      if (item != null && item !== '') next.append(name, String(item));
  }
  const nextQuery = next.toString();
  navigate(path.value + (nextQuery && `?${nextQuery}`), { replace: true });
}

/** Follow the browser's history, and links of this site without loading the page anew. */
export function startRouter() {
  addEventListener('popstate', () => {
    address.value = location.pathname + location.search;
  });
  document.addEventListener('click', (event) => {
    const link = event.target instanceof Element ? event.target.closest('a[href]') : null;
    if (!(link instanceof HTMLAnchorElement) || event.defaultPrevented || event.button !== 0) return;
    if (
      event.metaKey ||
      event.ctrlKey ||
      event.shiftKey ||
      event.altKey ||
      link.target ||
      link.hasAttribute('download')
    )
      return;
    if (link.origin !== location.origin || !matchRoute(link.pathname)) return;
    if (link.hash && link.pathname + link.search === address.value) return; // a place in this page
    event.preventDefault();
    navigate(link.pathname + link.search);
    scrollTo(0, 0);
  });
}
