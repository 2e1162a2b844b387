// One run, live.

import { html, useEffect, useRef, useState } from '../../vendor/preact.js';
import { Icon } from '../components/icon.js';
import { Failure as RequestFailure, Loading, Prose } from '../components/states.js';
import * as format from '../format.js';
import { isRewarded } from '../methods.js';
import { path, query } from '../router.js';
import { RunStore } from '../run_store.js';
import { Answers } from '../run/answers.js';
import { Charts } from '../run/charts.js';
import { Checkpoints } from '../run/checkpoints.js';
import { Configuration } from '../run/configuration.js';
import { Failure } from '../run/failure.js';
import { Files } from '../run/files.js';
import { Head } from '../run/head.js';
import { History } from '../run/history.js';
import { Log } from '../run/log.js';
import { Samples, groupByPrompt } from '../run/samples.js';
import { Summary } from '../run/summary.js';

/** @import * as api from '../api_types.js' */

export const title = 'Run';

/** @param {{ id: string }} props */
export default function Run({ id }) {
  const [store, setStore] = useState(/** @type {RunStore | null} */ (null));
  useEffect(() => {
    const opened = new RunStore(id);
    setStore(opened);
    opened.open();
    return () => opened.close();
  }, [id]);
  if (!store) return null;
  const run = store.run.value;
  const error = store.error.value;
  if (!run || error?.status === 404) {
    return error
      ? html`<${RequestFailure} error=${error} /><p><a href="/">All runs</a></p>`
      : html`<${Loading} what="the run" />`;
  }
  return html`<${RunView} store=${store} />`;
}

/** @param {{ store: RunStore }} props */
function RunView({ store }) {
  const run = store.run.value;
  void store.samplesVersion.value;
  useEffect(() => {
    document.title = `${run.name} · Anneal`;
  }, [run.name]);
  const requestedTab = query.value.get('tab') ?? 'overview';
  const tabs = /** @type {[string, string, number | null | undefined][]} */ ([
    ['overview', 'Overview', null],
    ['log', 'Log', null],
    ['checkpoints', 'Checkpoints', store.checkpoints.value?.length],
    run.task === 'predict' ? ['answers', 'Answers', null] : ['samples', 'Samples', store.samples.length || null],
    ['configuration', 'Configuration', null],
    ['files', 'Files', null],
    [
      'history',
      'History',
      store.attempts.value && store.attempts.value.length > 1 ? store.attempts.value.length : null,
    ],
  ]);
  const tab = tabs.some(([key]) => key === requestedTab) ? requestedTab : 'overview';
  const tabAddress = (/** @type {string} */ key) => (key === 'overview' ? path.value : `${path.value}?tab=${key}`);
  const failures = Object.entries(store.failures.value);
  const tabBar = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    // In a narrow window the tabs scroll: show the one that is open.
    const bar = /** @type {HTMLElement} */ (tabBar.current);
    const open = /** @type {HTMLElement} */ (bar.querySelector('[aria-current]'));
    bar.scrollLeft = open.offsetLeft - bar.offsetLeft - (bar.clientWidth - open.offsetWidth) / 2;
  }, [tab]);
  return html`
    <${Head} store=${store} />
    <${Summary} store=${store} />
    ${failures.length > 0 && html`<div class="box inside" role="alert">
      ${failures.map(
        ([part, error]) => html`<p key=${part} class="error-text">
          The ${part} could not be read,
          and ${error.isTemporary ? 'are tried again' : 'are not shown'}: <${Prose} text=${error.message} />
        </p>`,
      )}
    </div>`}
    ${run.status === 'pending' && run.pending_reason && html`<div class="box inside" role="status">
      <p class="warning-text"><${Prose} text=${run.pending_reason.message} /></p>
    </div>`}
    <nav class="tabs" aria-label="Parts of the run" ref=${tabBar}>
      ${tabs.map(
        ([key, name, count]) => html`<a href=${tabAddress(key)} aria-current=${key === tab ? 'page' : undefined}>
          ${name}
          ${count != null && html`<span class="n">${format.integer(count)}</span>`}
        </a>`,
      )}
    </nav>
    ${tab === 'overview' && html`<${Overview} store=${store} />`}
    ${tab === 'log' && html`<${Log} store=${store} height="max(320px, calc(100vh - 400px))" />`}
    ${tab === 'checkpoints' && html`<${Checkpoints} store=${store} />`}
    ${tab === 'answers' && html`<${Answers} store=${store} />`}
    ${tab === 'samples' && html`<${Samples} store=${store} />`}
    ${tab === 'configuration' && html`<${Configuration} store=${store} />`}
    ${tab === 'files' && html`<${Files} store=${store} />`}
    ${tab === 'history' && html`<${History} store=${store} />`}
  `;
}

/** @param {{ store: RunStore }} props */
function Overview({ store }) {
  const run = store.run.value;
  const checkpoints = store.checkpoints.value ?? [];
  const newest = groupByPrompt(store.samples)[0]?.samples.at(-1);
  const evalName = isRewarded(run.config.method) ? 'eval_reward' : 'eval_loss';
  return html`
    ${run.status === 'failed' && html`<${Failure} store=${store} />`}
    <div class="two">
      <${Charts} store=${store} />
      <aside class="side" aria-label="Newest results">
        <section class="box">
          <header>
            <h2>Checkpoints</h2>
            <span class="sub">${store.checkpoints.value?.length}</span>
            <span class="grow"></span>
            <a class="sub" href=${`${path.value}?tab=checkpoints`}>All</a>
          </header>
          <ul class="list">
            ${checkpoints
              .slice(0, 4)
              .map(
                (checkpoint) => html`<li key=${checkpoint.id}>
                  <span class="num name">${format.integer(checkpoint.step)}</span>
                  <span class="grow sub num">
                    ${checkpoint.metrics[evalName] != null
                      ? `eval ${format.loss(checkpoint.metrics[evalName])}`
                      : format.bytes(checkpoint.bytes)}
                  </span>
                  ${checkpoint.is_best && html`<span class="tag best">best</span>`}
                  ${checkpoint.pinned && html`<${Icon} name="pin" label="pinned" />`}
                </li>`,
              )}
            ${checkpoints.length === 0 && html`<li class="muted">
              ${store.checkpoints.value ? 'None yet.' : 'Loading …'}
            </li>`}
          </ul>
        </section>
        ${newest && html`<section class="box">
          <header>
            <h2>Newest sample</h2>
            <span class="sub num">step ${format.integer(newest.step)}</span>
            <span class="grow"></span>
            <a class="sub" href=${`${path.value}?tab=samples`}>All</a>
          </header>
          <div class="say"><p class="q mono clip">${newest.prompt}</p><p class="a">${newest.completion}</p></div>
        </section>`}
        ${store.device.value && html`<${Device} device=${store.device.value} />`}
      </aside>
    </div>
    <div class="below"><${Log} store=${store} height="232px" /></div>
  `;
}

/** @param {{ device: api.DeviceEvent }} props */
const Device = ({ device }) => html`<section class="box">
  <header><h2>Device</h2><span class="sub">GPU ${device.index}</span></header>
  <dl class="kv">
    <dt>Utilization</dt>
    <dd>${device.utilization_percent == null ? '–' : `${Math.round(device.utilization_percent)} %`}</dd>
    <dt>Memory</dt>
    <dd>${format.gib(device.memory_mb)} GiB</dd>
    <dt>Temperature</dt>
    <dd>${device.temperature_celsius == null ? '–' : `${device.temperature_celsius} °C`}</dd>
    <dt>Power</dt>
    <dd>${device.power_watts == null ? '–' : `${Math.round(device.power_watts)} W`}</dd>
  </dl>
</section>`;
