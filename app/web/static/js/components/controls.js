// Small controls that every page uses.

import { html, useEffect, useRef, useState } from '../../vendor/preact.js';
import * as format from '../format.js';
import { Icon } from './icon.js';

/** @type {Record<string, [import('./icon.js').IconName, string]>} Icon and word of each status. */
const STATUS_LABELS = {
  pending: ['ring', 'Pending'],
  initializing: ['spin', 'Starting'],
  running: ['dot', 'Running'],
  checkpointing: ['save', 'Saving'],
  completed: ['check', 'Completed'],
  failed: ['cross', 'Failed'],
  cancelled: ['square', 'Stopped'],
};
export const STATUSES = Object.keys(STATUS_LABELS);

/** @param {string} status */
export const labelStatus = (status) => STATUS_LABELS[status]?.[1] ?? status;

/** @param {{ status: string, plain?: boolean }} props */
export const Chip = ({ status, plain }) =>
  html`<span class=${plain ? 'chip plain' : 'chip'} data-s=${status}>
    <${Icon} name=${STATUS_LABELS[status]?.[0] ?? 'ring'} />
    ${labelStatus(status)}
  </span>`;

/** @param {{ value: number, status?: string, label: string }} props `value`: from 0 to 1. */
export const Bar = ({ value, status, label }) => {
  const share = Math.min(Math.max(value || 0, 0), 1);
  return html`<div
    class="bar"
    data-s=${status}
    role="progressbar"
    aria-label=${label}
    aria-valuenow=${Math.round(share * 100)}
    aria-valuemin="0"
    aria-valuemax="100"
  >
    <i style=${{ width: `${100 * share}%` }}></i>
  </div>`;
};

/**
 * One of a few choices.
 * @param {{ label: string, value: string, options: [string, string][], onChange: (value: string) => void }} props
 */
export const Choice = ({ label, value, options, onChange }) =>
  html`<span class="seg" role="group" aria-label=${label}>
    ${options.map(
      ([key, text]) => html`<button type="button" aria-pressed=${String(key === value)} onClick=${() => onChange(key)}>
        ${text}
      </button>`,
    )}
  </span>`;

/** @param {{ text: string, shown?: string, label: string }} props */
export function Copy({ text, shown, label }) {
  const [done, setDone] = useState(false);
  useEffect(() => {
    if (!done) return undefined;
    const timer = setTimeout(() => setDone(false), 1500);
    return () => clearTimeout(timer);
  }, [done]);
  const copy = async () => {
    // Over plain HTTP, other than on this machine, browsers offer no clipboard: the text is selected for copying.
    const isCopied = await navigator.clipboard?.writeText(text).then(
      () => true,
      () => false,
    );
    if (isCopied) setDone(true);
    else prompt(label, text);
  };
  return html`<button type="button" class="copy" title=${label} onClick=${copy}>
    ${shown ?? text}
    <span aria-live="polite">${done ? ' copied' : ''}</span>
  </button>`;
}

/**
 * Button that opens a list of actions.
 * @param {{ button: any, children: any, kind?: string, label?: string }} props
 */
export function Menu({ button, children, kind = '', label }) {
  const [isOpen, setOpen] = useState(false);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const queryItems = () =>
    /** @type {HTMLElement[]} */ ([...(box.current?.querySelectorAll('.pop button:not(:disabled), .pop a') ?? [])]);
  useEffect(() => {
    if (!isOpen) return undefined;
    // A button near the left edge of a narrow window opens its list to the right.
    const list = /** @type {HTMLElement} */ (box.current?.querySelector('.pop'));
    if (list.getBoundingClientRect().left < 0) list.classList.add('rightward');
    queryItems()[0]?.focus();
    /** @param {PointerEvent} event */
    const closeOutside = (event) => box.current?.contains(/** @type {Node} */ (event.target)) || setOpen(false);
    addEventListener('pointerdown', closeOutside);
    return () => removeEventListener('pointerdown', closeOutside);
  }, [isOpen]);
  // What a dialog that the list opens gives the focus back to.
  const closeAtButton = () => {
    setOpen(false);
    box.current?.querySelector('button')?.focus();
  };
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    if (!isOpen) return;
    if (event.key === 'Escape') closeAtButton();
    else if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
      event.preventDefault();
      const menuItems = queryItems();
      const index = menuItems.indexOf(/** @type {HTMLElement} */ (document.activeElement));
      menuItems[(index + (event.key === 'ArrowDown' ? 1 : menuItems.length - 1)) % menuItems.length]?.focus();
    } else if (event.key === 'Tab') setOpen(false);
  };
  return html`<div class="menu" ref=${box} onKeyDown=${onKey}>
    <button
      type="button"
      class=${`btn ${kind}`}
      aria-haspopup="true"
      aria-expanded=${String(isOpen)}
      aria-label=${label}
      onClick=${() => setOpen(!isOpen)}
    >
      ${button}
    </button>
    ${isOpen && html`<div class="pop" onClick=${closeAtButton}>${children}</div>`}
  </div>`;
}

/**
 * Dialog over the page; Escape and a click outside close it.
 * @param {{ title: string, onClose: () => void, children: any, wide?: boolean }} props
 */
export function Dialog({ title, onClose, children, wide }) {
  const box = useRef(/** @type {HTMLDialogElement | null} */ (null));
  // A text that is selected with the mouse may end outside: only a press outside closes the dialog.
  const isPressedOutside = useRef(false);
  useEffect(() => {
    const element = box.current;
    const opener = /** @type {HTMLElement | null} */ (document.activeElement);
    element?.showModal();
    // The browser would focus the button that closes it.
    const first = element?.querySelector('.inner > header ~ * :is(input, select, textarea, button, a):not(:disabled)');
    /** @type {HTMLElement | null | undefined} */ (first)?.focus();
    return () => {
      element?.close();
      opener?.focus(); // the dialog leaves the page at once, and the browser would focus nothing
    };
  }, []);
  return html`<dialog
    class=${wide ? 'dialog wide' : 'dialog'}
    ref=${box}
    aria-label=${title}
    onCancel=${onClose}
    onPointerDown=${(/** @type {PointerEvent} */ event) => {
      isPressedOutside.current = event.target === box.current;
    }}
    onClick=${(/** @type {MouseEvent} */ event) =>
      event.target === box.current && isPressedOutside.current && onClose()}
  >
    <div class="inner">
      <header class="row">
        <h2 class="grow">${title}</h2>
        <button type="button" class="btn quiet icon small" aria-label="Close" onClick=${onClose}>
          <${Icon} name="cross" />
        </button>
      </header>
      ${children}
    </div>
  </dialog>`;
}

/**
 * Small curve of a table's row.
 * @param {{ values: (number | null)[], status?: string, what?: string, width?: number, height?: number }} props
 */
export function Spark({ values, status, what = 'Loss', width = 112, height = 26 }) {
  const numbers = /** @type {number[]} */ (values.filter((value) => value != null));
  if (numbers.length < 2) return html`<span class="faint">–</span>`;
  const low = Math.min(...numbers);
  const high = Math.max(...numbers);
  const positionOf = (/** @type {number} */ index) => 1 + (index * (width - 4)) / (values.length - 1);
  const heightOf = (/** @type {number} */ value) => 2 + (height - 4) * (1 - (value - low) / (high - low || 1));
  let line = '';
  values.forEach((value, index) => {
    if (value != null) line += `${line ? 'L' : 'M'}${positionOf(index).toFixed(1)} ${heightOf(value).toFixed(1)}`;
  });
  const color =
    status === 'failed'
      ? 'var(--bad)'
      : status === 'running' || status === 'checkpointing'
        ? 'var(--accent)'
        : 'var(--faint)';
  return html`<svg
    class="spark"
    width=${width}
    height=${height}
    role="img"
    aria-label=${`${what} from ${format.loss(numbers[0])} to ${format.loss(numbers.at(-1))}`}
  >
    <path d=${line} fill="none" stroke=${color} stroke-width="1.5" stroke-linejoin="round" />
    <circle
      cx=${positionOf(values.lastIndexOf(/** @type {number} */ (numbers.at(-1))))}
      cy=${heightOf(/** @type {number} */ (numbers.at(-1)))}
      r="2.2"
      fill=${color}
    />
  </svg>`;
}
