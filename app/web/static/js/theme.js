// Light or dark: as the system, or as chosen in this browser.

import { effect, signal } from '../vendor/preact.js';

/** @typedef {'auto' | 'light' | 'dark'} Theme */

const NAME = 'anneal.theme';

/** @returns {Theme} */
function stored() {
  const found = localStorage.getItem(NAME);
  return found === 'light' || found === 'dark' ? found : 'auto';
}

export const theme = signal(stored());

/** Changes whenever the colors of the page do; charts are drawn anew then. */
export const palette = signal(0);

/** @param {Theme} chosen */
export function choose(chosen) {
  localStorage.setItem(NAME, chosen);
  theme.value = chosen;
}

export function start() {
  effect(() => {
    if (theme.value === 'auto') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme.value;
    palette.value = palette.peek() + 1;
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => (palette.value += 1));
}
