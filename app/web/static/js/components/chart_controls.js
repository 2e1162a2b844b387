// How curves are drawn, and its controls; the address of the page keeps what is chosen.

import { html } from '../../vendor/preact.js';
import * as format from '../format.js';
import { query, setQuery } from '../router.js';
import { Choice } from './controls.js';

const AXES = /** @type {[string, string][]} */ ([
  ['step', 'Step'],
  ['epoch', 'Epoch'],
  ['time', 'Time'],
]);
const DEFAULT_SMOOTHING = 0.6;

/**
 * What the address says about the drawing of curves.
 * @returns {{ axis: import('../curves.js').Axis, smoothing: number, logScale: boolean }}
 */
export function readChartSettings() {
  const params = query.value;
  return {
    axis: /** @type {import('../curves.js').Axis} */ (params.get('axis') ?? 'step'),
    smoothing: params.has('smoothing') ? Number(params.get('smoothing')) : DEFAULT_SMOOTHING,
    logScale: params.get('log') === '1',
  };
}

/**
 * Formats of the positions on an axis, for `LineChart`.
 * @param {import('../curves.js').Axis} axis
 * @returns {{ position?: (position: number) => string, ticks?: (position: number) => string }}
 */
export function axisFormats(axis) {
  if (axis === 'epoch') return { position: (position) => `epoch ${position.toFixed(2)}` };
  return axis === 'time' ? { position: format.duration, ticks: format.duration } : {};
}

/** @param {{ children: any }} props `children`: shown at the end of the bar. */
export function ChartControls({ children }) {
  const { axis, smoothing, logScale } = readChartSettings();
  return html`<div class="chartbar">
    <span class="row">
      Along <${Choice}
        label="Horizontal axis"
        value=${axis}
        options=${AXES}
        onChange=${(/** @type {string} */ value) => setQuery({ axis: value === 'step' ? null : value, zoom: null })}
      />
    </span>
    <label>
      Smoothing <input
        type="range"
        min="0"
        max="0.99"
        step="0.01"
        value=${smoothing}
        onInput=${(/** @type {any} */ event) => setQuery({ smoothing: event.target.value })}
      />
      <span class="num">${smoothing.toFixed(2)}</span>
    </label>
    <label class="check">
      <input
        type="checkbox"
        checked=${logScale}
        onChange=${(/** @type {any} */ event) => setQuery({ log: event.target.checked ? 1 : null })}
      />
      Log scale
    </label>
    <span class="grow"></span>
    ${children}
  </div>`;
}
