// Memory, time and cost that a new run is estimated to need.

import { html } from '../../vendor/preact.js';
import { Prose } from '../components/states.js';
import * as format from '../format.js';

/** @type {Record<string, string>} What an estimate is based on. */
const BASIS_LABELS = {
  formula: 'by formula',
  history: 'from earlier runs of this model',
  comparable: 'from runs on this kind of device',
  assumed: 'with an assumed speed',
};

/** @param {{ estimate: any }} props */
export function Estimate({ estimate }) {
  const { memory_mb: memory, device } = estimate;
  const others = estimate.fits.slice(1);
  const parts = Object.entries(memory ?? {}).filter(([name, size]) => name !== 'total' && size > 0);
  const scale = Math.max(
    device.memory_mb ?? 0,
    memory?.total ?? 0,
    parts.reduce((sum, [, size]) => sum + size, 0),
  );
  const labels = parts.map(([name, size]) => `${name.replaceAll('_', ' ')} ${format.mebibytes(size)}`);
  const fit = estimate.fits[0];
  return html`<section class="box" aria-label="Estimate">
    <header><h2>Estimate</h2><span class="sub">${device.name}</span></header>
    <div class="inside">
      ${memory && html`
        <div class="row between">
          <span>Memory</span>
          <b class="num">
            ${format.mebibytes(memory.total)}
            ${device.memory_mb && ` of ${format.mebibytes(device.memory_mb)}`}
          </b>
        </div>
        <div class="stack" role="img" aria-label=${`Memory: ${labels.join(', ')}`}>
          ${parts.map(
            ([, size], index) => html`<i style=${{
              width: `${(100 * size) / scale}%`,
              background: `var(--c${(index % 8) + 1})`,
            }}></i>`,
          )}
        </div>
        <div class="legend">
          ${parts.map(
            ([name, size], index) => html`<span>
              <i class="swatch" style=${{ background: `var(--c${(index % 8) + 1})` }}></i>
              ${name.replaceAll('_', ' ')} ${format.mebibytes(size)}
            </span>`,
          )}
        </div>
      `}
      ${fit && fit.fits === false && html`
        <p class="error-text"><${Prose} text=${fit.reason} /></p>
        ${fit.advice.length > 0 && html`<ul class="checks">
          ${fit.advice.map(
            (/** @type {string} */ sentence) => html`<li class="sub"><${Prose} text=${sentence} /></li>`,
          )}
        </ul>`}
      `}
      ${others.length > 0 && html`<details>
        <summary class="sub">${format.counted(others.length, 'other device')}</summary>
        <ul class="checks">
          ${others.map(
            (/** @type {any} */ otherFit) => html`<li class=${otherFit.fits === false ? 'warning-text' : 'sub'}>
              ${otherFit.device.name}: <${Prose} text=${otherFit.reason} />
            </li>`,
          )}
        </ul>
      </details>`}
      <dl class="kv left">
        <dt>Steps</dt>
        <dd class="num">${format.integer(estimate.steps)}</dd>
        <dt>Tokens</dt>
        <dd class="num">${format.integer(estimate.tokens)}</dd>
        <dt>Time</dt>
        <dd class="num">
          ${estimate.seconds != null && estimate.seconds < 1 ? 'less than 1 s' : format.duration(estimate.seconds)}
        </dd>
        ${estimate.cost && html`
          <dt>Cost</dt>
          <dd class="num">${estimate.cost.amount?.toFixed(2)} ${estimate.cost.currency}</dd>
        `}
      </dl>
      <p class="sub">
        ${Object.entries(estimate.confidence)
          .filter(([, basis]) => basis != null)
          .map(
            ([name, basis]) =>
              `${name === 'seconds' ? 'time' : 'memory'} ${BASIS_LABELS[/** @type {string} */ (basis)] ?? basis}`,
          )
          .join('; ')
          .replace(/^./, (first) => first.toUpperCase())}
      </p>
      ${estimate.unknown.length > 0 && html`<details>
        <summary class="sub">${format.counted(estimate.unknown.length, 'value')} unknown</summary>
        <ul class="checks">
          ${estimate.unknown.map(
            (/** @type {any} */ unknown) => html`<li class="sub">
              <code>${unknown.field}</code> <${Prose} text=${unknown.reason} />
            </li>`,
          )}
        </ul>
      </details>`}
      ${estimate.assumptions.length > 0 && html`<details>
        <summary class="sub">Assumptions</summary>
        <ul class="checks">
          ${estimate.assumptions.map(
            (/** @type {string} */ sentence) => html`<li class="sub"><${Prose} text=${sentence} /></li>`,
          )}
        </ul>
      </details>`}
    </div>
  </section>`;
}
