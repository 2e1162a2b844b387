// Runs side by side: their curves, their results, and where their configurations differ.

import { html, useEffect, useState } from '../../vendor/preact.js';
import { get } from '../api.js';
import { colorOf, LineChart } from '../components/chart.js';
import { axisFormats, ChartControls, readChartSettings } from '../components/chart_controls.js';
import { Chip, Copy, Dialog } from '../components/controls.js';
import { Icon } from '../components/icon.js';
import { Empty, ErrorText, Failure, Loading, Prose } from '../components/states.js';
import { computeExtent, computePositions } from '../curves.js';
import * as format from '../format.js';
import { isRewarded } from '../methods.js';
import { useResource, useSettled } from '../resource.js';
import { query, setQuery } from '../router.js';

export const title = 'Compare';

const MOST_RUNS = 20;
const MOST_POINTS = 1000;
const LIVE_EVERY_MS = 5000;
const LIVE = new Set(['pending', 'initializing', 'running', 'checkpointing']);
/** Curves that can be shown: series, title, format. */
const CURVES = /** @type {[string, string, (value: number | null | undefined) => string][]} */ ([
  ['loss', 'Train loss', format.loss],
  ['eval_loss', 'Eval loss', format.loss],
  ['extra.reward', 'Train reward', format.loss],
  ['eval_reward', 'Eval reward', format.loss],
  ['learning_rate', 'Learning rate', format.significant],
  ['grad_norm', 'Gradient norm', format.significant],
  ['extra.tokens_per_second', 'Tokens/s', format.integer],
]);

export default function Compare() {
  const params = query.value;
  const ids = [...new Set((params.get('ids') ?? '').split(',').filter(Boolean))];
  const [isLive, setLive] = useState(false);
  const isValid = ids.length >= 2 && ids.length <= MOST_RUNS;
  const everyMs = isLive ? LIVE_EVERY_MS : undefined;
  const comparison = useResource(
    (signal) => get('/v1/runs/compare', { ids: ids.join(',') }, signal),
    isValid ? ids.join(',') : null,
    { everyMs },
  );
  const runs = comparison.data?.runs ?? [];
  const isAnyLive = runs.some((/** @type {any} */ run) => LIVE.has(run.status));
  useEffect(() => setLive(isAnyLive), [isAnyLive]);
  useEffect(() => {
    document.title = `Compare ${ids.length} runs · Anneal`;
  }, [ids.length]);
  const [isAdding, setAdding] = useState(false);
  const head = html`
    <div class="head center">
      <div class="grow">
        <p class="crumb"><a href="/">Runs</a></p>
        <h1>${ids.length ? `Compare ${format.counted(ids.length, 'run')}` : 'Compare runs'}</h1>
      </div>
      <div class="acts">
        <button type="button" class="btn" disabled=${ids.length >= MOST_RUNS} onClick=${() => setAdding(true)}>
          <${Icon} name="plus" />
          Add runs
        </button>
        <${Copy} text=${location.href} shown="Copy link" label="Copy the link to this comparison" />
      </div>
    </div>
    ${isAdding && html`<${AddRuns} ids=${ids} onClose=${() => setAdding(false)} />`}
  `;
  if (!isValid) {
    return html`
      ${head}
      <section class="box">
        <${Empty} title=${ids.length > MOST_RUNS
          ? `At most ${MOST_RUNS} runs can be compared.`
          : 'Choose at least two runs.'}>
          <p class="muted">Select them in the list of runs, or add them here.</p>
          <p><a class="btn" href="/">All runs</a></p>
        <//>
      </section>
    `;
  }
  if (!comparison.data) {
    return html`
      ${head}
      ${comparison.error
        ? html`<section class="box">
            <${Failure} error=${comparison.error} onRetry=${comparison.reload} />
            <p class="state"><a href="/">All runs</a></p>
          </section>`
        : html`<${Loading} what="runs" />`}
    `;
  }
  const hidden = new Set(params.getAll('hide'));
  const coloredRuns = runs.map((/** @type {any} */ run, /** @type {number} */ index) => ({
    ...run,
    color: colorOf(index),
  }));
  const toggleRun = (/** @type {string} */ id) =>
    setQuery({ hide: hidden.has(id) ? [...hidden].filter((hiddenId) => hiddenId !== id) : [...hidden, id] });
  return html`
    ${head}
    <div class="row wrap filters">
      ${coloredRuns.map(
        (/** @type {any} */ run) => html`<button
          type="button"
          class="btn small"
          key=${run.run_id}
          aria-pressed=${String(!hidden.has(run.run_id))}
          style=${hidden.has(run.run_id) ? { opacity: 0.55 } : {}}
          onClick=${() => toggleRun(run.run_id)}
        >
          <i class="swatch" style=${{ background: `var(${run.color})` }}></i>
          <span class="clip">${run.name}</span>
        </button>`,
      )}
    </div>
    ${comparison.data.caution && html`<div class="box inside caution" role="note">
      <p class="warning-text"><${Prose} text=${comparison.data.caution} /></p>
    </div>`}
    <${Curves} runs=${coloredRuns.filter((/** @type {any} */ run) => !hidden.has(run.run_id))} everyMs=${everyMs} />
    <${Results}
      runs=${coloredRuns}
      areComparable=${!comparison.data.caution}
      differences=${comparison.data.differences}
      common=${comparison.data.common}
      ids=${ids}
    />
  `;
}

/** @param {{ runs: any[], everyMs: number | undefined }} props */
function Curves({ runs, everyMs }) {
  const { axis, smoothing, logScale } = readChartSettings();
  const chosenCurves = query.value.getAll('curve');
  const rewardedCount = runs.filter((run) => isRewarded(run.method)).length;
  const defaultCurves = [
    ...(rewardedCount < runs.length ? ['loss', 'eval_loss'] : []),
    ...(rewardedCount > 0 ? ['extra.reward', 'eval_reward'] : []),
  ];
  const names = chosenCurves.length ? chosenCurves : defaultCurves;
  const offeredCurves = CURVES.filter(([name]) => rewardedCount > 0 || !name.endsWith('reward'));
  const toggleCurve = (/** @type {string} */ name) => {
    const next = names.includes(name) ? names.filter((shownName) => shownName !== name) : [...names, name];
    setQuery({ curve: next.length ? next : null });
  };
  const ids = runs.map((run) => run.run_id).join(',');
  const readCurve = (/** @type {string} */ name, /** @type {AbortSignal} */ signal) =>
    get('/v1/runs/curves', { ids, name, max_points: MOST_POINTS }, signal);
  const curveData = useResource(
    (signal) => Promise.all(names.map((name) => readCurve(name, signal))),
    ids ? `${names} ${ids}` : null,
    { everyMs },
  );
  const curvesByName = new Map(curveData.data?.map((/** @type {any} */ response) => [response.name, response.data]));
  const charts = CURVES.filter(([name]) => names.includes(name)).map(([name, text, numbers]) => {
    const byRun = new Map((curvesByName.get(name) ?? []).map((/** @type {any} */ curve) => [curve.run_id, curve]));
    const curves = runs.flatMap((run) => {
      const runCurve = byRun.get(run.run_id);
      if (!runCurve || runCurve.series.steps.length === 0) return [];
      return [
        {
          name: run.name,
          color: run.color,
          x: computePositions(runCurve.series, axis, runCurve),
          y: runCurve.series.values,
          dots: name.startsWith('eval'),
        },
      ];
    });
    return { name, text, numbers, curves };
  });
  const extent = computeExtent(charts.flatMap(({ curves }) => curves.map((curve) => curve.x)));
  return html`
    <${ChartControls}>
      <span class="row wrap" role="group" aria-label="Curves">
        ${offeredCurves.map(
          ([name, text]) => html`<label class="check">
            <input type="checkbox" checked=${names.includes(name)} onChange=${() => toggleCurve(name)} />
            ${text}
          </label>`,
        )}
      </span>
    <//>
    ${!curveData.data &&
    ids &&
    (curveData.error
      ? html`<${Failure} error=${curveData.error} onRetry=${curveData.reload} />`
      : html`<${Loading} what="curves" />`)}
    <div class="charts">
      ${charts.map(({ name, text, numbers, curves }) =>
        curves.length === 0
          ? curveData.data &&
            html`<p class="chart half tall state muted" key=${name}>No run has the curve “${text}”.</p>`
          : html`<${LineChart}
              key=${name}
              title=${text}
              shape="half tall"
              group="compare"
              format=${numbers}
              extent=${extent}
              curves=${curves}
              smoothing=${name.startsWith('eval') || name === 'learning_rate' ? 0 : smoothing}
              logScale=${logScale && name !== 'learning_rate'}
              ...${axisFormats(axis)}
            />`,
      )}
    </div>
  `;
}

/**
 * Results of runs, in the order of the table: text, value, format, and which value is best.
 * @type {[string, (run: any) => number | null | undefined, (value: any) => string, ('min' | 'max')?][]}
 */
const RESULTS = [
  ['Lowest train loss', (run) => (isRewarded(run.method) ? null : run.best_loss), format.loss, 'min'],
  ['Best eval loss', (run) => run.metrics['eval.eval_loss']?.min, format.loss, 'min'],
  ['Best eval reward', (run) => run.metrics['eval.eval_reward']?.max, format.loss, 'max'],
  ['Steps', (run) => run.current_step, format.integer],
  ['Duration', (run) => run.seconds, format.duration, 'min'],
  ['Tokens/s', (run) => run.metrics['extra.tokens_per_second']?.last, format.integer, 'max'],
  ['Peak GPU memory, GiB', (run) => run.metrics.gpu_memory_mb?.max, format.gib, 'min'],
];

/**
 * @param {{
 *   runs: any[], areComparable: boolean, differences: Record<string, Record<string, unknown>>,
 *   common: Record<string, unknown>, ids: string[],
 * }} props
 */
function Results({ runs, areComparable, differences, common, ids }) {
  const [isAll, setAll] = useState(false);
  const removeRun = (/** @type {string} */ id) => setQuery({ ids: ids.filter((otherId) => otherId !== id).join(',') });
  const rows = RESULTS.filter(([, readResult]) => runs.some((run) => readResult(run) != null));
  return html`<section class="box scroll below" tabindex="0" role="region" aria-label="Results and differences">
    <table class="table">
      <thead>
        <tr>
          <th class="fields"><span class="sr">Field</span></th>
          ${runs.map(
            (run) => html`<th key=${run.run_id}>
              <span class="row">
                <i class="swatch" style=${{ background: `var(${run.color})` }}></i>
                <a class="name" href=${`/runs/${run.run_id}`}>${run.name}</a>
                <${Chip} status=${run.status} plain />
                <span class="tag">${run.method}</span>
                ${runs.length > 2 && html`<button
                  type="button"
                  class="btn quiet icon small"
                  aria-label=${`Remove ${run.name} from the comparison`}
                  onClick=${() => removeRun(run.run_id)}
                >
                  <${Icon} name="cross" />
                </button>`}
              </span>
            </th>`,
          )}
        </tr>
      </thead>
      <tbody>
        ${rows.map(([text, readResult, formatResult, best]) => {
          const values = /** @type {number[]} */ (runs.map(readResult).filter((result) => result != null));
          // Values that read the same are equally good, whatever their further digits.
          // A run that ended early or still trains is not the fastest one.
          const isEqual =
            text === 'Duration'
              ? runs.every((run) => run.status === 'completed')
              : areComparable || !text.match(/loss|reward/);
          const isCompared = best && isEqual;
          const winner =
            isCompared && new Set(values.map(formatResult)).size > 1 ? formatResult(Math[best](...values)) : null;
          return html`<tr key=${text}>
            <td class="muted">${text}</td>
            ${runs.map(
              (run) => html`<td class="num nowrap">
                ${formatResult(readResult(run))} ${formatResult(readResult(run)) ===
                  winner && html`<span class="tag best">best</span>`}
              </td>`,
            )}
          </tr>`;
        })}
        <tr>
          <td colspan=${runs.length + 1} class="sub band">
            ${Object.keys(differences).length ? 'Differences' : 'The configurations are the same.'}
          </td>
        </tr>
        ${Object.entries(differences).map(
          ([field, values]) => html`<tr key=${field}>
            <td class="mono muted">${field.replace(/^config\./, '')}</td>
            ${runs.map((run) => html`<td class="mono">${format.configValue(values[run.run_id])}</td>`)}
          </tr>`,
        )}
        <tr>
          <td colspan=${runs.length + 1} class="sub band">
            <button
              type="button"
              class="btn quiet small"
              aria-expanded=${String(isAll)}
              onClick=${() => setAll(!isAll)}
            >
              ${format.counted(Object.keys(common).length, 'field')} ${Object.keys(common).length === 1
                ? 'is'
                : 'are'} the
              same in all
            </button>
          </td>
        </tr>
        ${isAll &&
        Object.entries(common).map(
          ([field, value]) => html`<tr key=${field}>
            <td class="mono muted">${field.replace(/^config\./, '')}</td>
            <td class="mono muted" colspan=${runs.length}>${format.configValue(value)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </section>`;
}

/** @param {{ ids: string[], onClose: () => void }} props */
function AddRuns({ ids, onClose }) {
  const [text, setText] = useState('');
  const search = useSettled(text.trim(), 250);
  const matches = useResource(
    (signal) => get('/v1/runs', { search: search, view: 'row', limit: 20 }, signal),
    `add ${search}`,
  );
  const addRun = (/** @type {string} */ id) => setQuery({ ids: [...ids, id].join(',') });
  return html`<${Dialog} title="Add runs" onClose=${onClose}>
    <div class="f">
      <label for="find-runs">Search by name, tag or ID</label>
      <input
        id="find-runs"
        type="search"
        value=${text}
        onInput=${(/** @type {any} */ event) => setText(event.target.value)}
      />
    </div>
    <${ErrorText} error=${matches.error} />
    <ul class="list">
      ${(matches.data?.data ?? []).map(
        (/** @type {any} */ run) => html`<li key=${run.id}>
          <span class="grow clip">${run.name}</span>
          <${Chip} status=${run.status} plain />
          <button
            type="button"
            class="btn small"
            disabled=${ids.includes(run.id) || ids.length >= MOST_RUNS}
            onClick=${() => addRun(run.id)}
          >
            ${ids.includes(run.id) ? 'Added' : 'Add'}
          </button>
        </li>`,
      )}
      ${matches.data?.data.length === 0 && html`<li class="muted">No run matches.</li>`}
    </ul>
    <footer><button type="button" class="btn primary" onClick=${onClose}>Done</button></footer>
  <//>`;
}
