// Icons of 16 by 16, drawn with the color of the text.

import { html } from '../../vendor/preact.js';

const PATHS = {
  check: 'M3.5 8.5l3 3 6-7',
  cross: 'M4.5 4.5l7 7m0-7l-7 7',
  square: 'M5 5h6v6H5z',
  save: 'M8 3v7m0 0l-3-3m3 3l3-3M3.5 13h9',
  spin: 'M8 2.5a5.5 5.5 0 1 1-5.5 5.5',
  more: 'M3.5 8h.01M8 8h.01M12.5 8h.01',
  down: 'M4.5 6.5L8 10l3.5-3.5',
  search: 'M7 12A5 5 0 1 0 7 2a5 5 0 0 0 0 10zm3.6-1.4L14 14',
  stop: 'M4.5 4.5h7v7h-7z',
  play: 'M5 3.5l7.5 4.5L5 12.5z',
  plus: 'M8 3v10M3 8h10',
  star: 'M8 2.3l1.75 3.6 3.95.55-2.87 2.76.7 3.93L8 11.27l-3.53 1.87.7-3.93L2.3 6.45l3.95-.55z',
  copy: 'M5.5 5.5v-3h8v8h-3M2.5 5.5h8v8h-8z',
  warn: 'M8 2.2L14.5 13.5h-13zM8 6.5v3.2m0 1.9v.1',
  pin: 'M6 2.5h4l-.5 4 2 2.5h-7l2-2.5zM8 9v4.5',
  file: 'M4 2.5h5l3 3v8H4zM9 2.5v3h3',
  user: 'M8 8a2.7 2.7 0 1 0 0-5.4A2.7 2.7 0 0 0 8 8zm-5 5.5c.6-2.3 2.5-3.5 5-3.5s4.4 1.2 5 3.5',
};

/** @typedef {keyof typeof PATHS | 'dot' | 'ring'} IconName */

/**
 * @param {{ name: IconName, label?: string }} props `label`: for an icon that stands alone.
 */
export function Icon({ name, label }) {
  const attributes = label ? { role: 'img', 'aria-label': label } : { 'aria-hidden': 'true' };
  if (name === 'dot') {
    return html`<svg class="i" viewBox="0 0 16 16" ...${attributes}>
      <circle class="pulse" cx="8" cy="8" r="3.6" fill="currentColor" stroke="none" />
      <circle cx="8" cy="8" r="6" opacity=".45" />
    </svg>`;
  }
  if (name === 'ring') {
    return html`<svg class="i" viewBox="0 0 16 16" ...${attributes}>
      <circle cx="8" cy="8" r="4.5" stroke-dasharray="2.6 2.2" />
    </svg>`;
  }
  return html`<svg class="i" viewBox="0 0 16 16" ...${attributes}><path d=${PATHS[name]} /></svg>`;
}
