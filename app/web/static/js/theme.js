// Light or dark: as the system, or as chosen in this browser.

import { effect, signal } from '../vendor/preact.js';

/** @typedef {'auto' | 'light' | 'dark'} Theme */

const STORAGE_KEY = 'anneal.theme';

/** @returns {Theme} */
function readStoredTheme() {
  const storedTheme = localStorage.getItem(STORAGE_KEY);
  return storedTheme === 'light' || storedTheme === 'dark' ? storedTheme : 'auto';
}

export const theme = signal(readStoredTheme());

/** Changes whenever the colors of the page do; charts are drawn anew then. */
export const palette = signal(0);

/** @param {Theme} selected */
export function chooseTheme(selected) {
  localStorage.setItem(STORAGE_KEY, selected);
  theme.value = selected;
}

export function startTheme() {
  effect(() => {
    if (theme.value === 'auto') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme.value;
    palette.value = palette.peek() + 1;
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => (palette.value += 1));
}
