// Cause of a failed run, with a correction that one click starts.

import { html, useRef } from '../../vendor/preact.js';
import { sendRequest, get, createIdempotencyKey } from '../api.js';
import { LineChart } from '../components/chart.js';
import { Icon } from '../components/icon.js';
import { Prose } from '../components/states.js';
import * as format from '../format.js';
import { useAction, useResource } from '../resource.js';
import { useNavigation } from '../router.js';
import { hasScope } from '../session.js';
import { ErrorDialog } from './head.js';

/** @param {{ store: import('../run_store.js').RunStore }} props */
export function Failure({ store }) {
  const navigate = useNavigation();
  const run = store.run.value;
  const postmortem = useResource((signal) => get(`/v1/runs/${run.id}/postmortem`, {}, signal), run.id);
  const action = useAction();
  const report = postmortem.data;
  const correction = report?.correction;
  // The same key for every click: one after a lost response starts no second run.
  const key = useRef(createIdempotencyKey());
  const startRun = () =>
    action.run(async () => {
      const { method, path, body } = correction.request;
      const newRun = await sendRequest(method, path, { body, headers: { 'Idempotency-Key': key.current } });
      navigate(`/runs/${newRun.id}`);
    });
  return html`
    <div class="banner" role="alert">
      <${Icon} name="warn" />
      <div>
        <h2><${Prose} text=${run.error_message ?? 'The run failed.'} /></h2>
        ${report && html`<p><${Prose} text=${`${report.probable_cause} ${report.advice ?? ''}`} /></p>`}
        ${correction && html`<div class="fix diff">
          ${Object.entries(correction.changes).map(
            ([field, value]) => html`<span class="tag">
              <code>${field}</code>\u00a0 <del>${format.configValue(run.config[field])}</del>
              <ins>${format.configValue(value)}</ins>
            </span>`,
          )}
        </div>`}
      </div>
      <div class="row wrap">
        ${hasScope('write') &&
        (correction
          ? html`
              <button type="button" class="btn primary" disabled=${action.busy} onClick=${startRun}>
                ${correction.request.path === '/v1/runs' ? 'Start the corrected run' : 'Resume with the correction'}
              </button>
              <a class="btn" href=${`/new?fix=${run.id}`}>Edit as a new run</a>
            `
          : html`<a class="btn" href=${`/new?from=${run.id}`}>New run like this</a>`)}
      </div>
      ${action.error && html`<${ErrorDialog} error=${action.error} onClose=${action.clear} />`}
    </div>
    ${report && html`<div class="two failed">
      <div class="side">
        ${report.memory.length > 1 && html`<div class="charts"><${Memory} report=${report} /></div>`}
        <section class="box log" style=${{ '--h': '190px' }} aria-label="Last lines">
          <header>
            <h2>Last lines</h2>
            <span class="grow"></span>
            <a class="sub" href=${`/runs/${run.id}?tab=log`}>Whole log</a>
          </header>
          <div class="lines wraps" tabindex="0" role="log" aria-label="Last lines" aria-live="off">
            ${report.last_lines.map(
              (/** @type {string} */ line) => html`<div class="ln"><time></time><span>${line}</span></div>`,
            )}
            ${report.last_lines.length === 0 && html`<p class="state muted">It printed nothing.</p>`}
          </div>
        </section>
      </div>
      <aside class="side" aria-label="How it ended">
        <section class="box">
          <header><h2>End of attempt ${report.attempt ?? '–'}</h2></header>
          <dl class="kv">
            <dt>Code</dt>
            <dd class="mono">${report.code}</dd>
            <dt>Phase</dt>
            <dd>${report.phase ?? '–'}${report.step != null ? `, step ${format.integer(report.step)}` : ''}</dd>
            <dt>Process</dt>
            <dd>${report.exit_signal ?? (report.exit_code == null ? '–' : `exit code ${report.exit_code}`)}</dd>
            <dt>Killed by the kernel</dt>
            <dd>${report.killed_by_kernel ? 'yes' : 'no'}</dd>
            ${report.peaks.device_mb > 0 && html`
              <dt>Peak GPU memory</dt>
              <dd>${format.gib(report.peaks.device_mb)} GiB</dd>
            `}
            ${report.peaks.host_mb > 0 && html`
              <dt>Peak host memory</dt>
              <dd>${format.gib(report.peaks.host_mb)} GiB</dd>
            `}
          </dl>
        </section>
      </aside>
    </div>`}
  `;
}

/** @param {{ report: any }} props */
function Memory({ report }) {
  const seconds = report.memory.map((/** @type {any} */ point) => point.seconds);
  const buildCurve = (/** @type {string} */ field, /** @type {string} */ name, /** @type {string} */ color) => ({
    name,
    color,
    x: seconds,
    y: report.memory.map((/** @type {any} */ point) => (point[field] == null ? null : point[field] / 1024)),
  });
  const curves = [buildCurve('device_mb', 'GPU', '--c6'), buildCurve('host_mb', 'host', '--c7')].filter((curve) =>
    curve.y.some((/** @type {number | null} */ value) => value != null),
  );
  return html`<${LineChart}
    title=${`Memory of attempt ${report.attempt}, GiB`}
    shape="wide flat"
    group="memory"
    curves=${curves}
    format=${(/** @type {number | null | undefined} */ value) => (value == null ? '–' : value.toFixed(1))}
    position=${format.duration}
    ticks=${format.duration}
  />`;
}
