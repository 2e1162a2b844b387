// Curves of a run, along steps, epochs or time.

import { html, useState } from '../../vendor/preact.js';
import { get } from '../api.js';
import { LineChart } from '../components/chart.js';
import { axisFormats, ChartControls, readChartSettings } from '../components/chart_controls.js';
import { Loading } from '../components/states.js';
import {
  createSeries,
  computeExtent,
  divideBySteps,
  computePositions,
  findStepsWithin,
  insertDetail,
} from '../curves.js';
import * as format from '../format.js';
import { isRewarded } from '../methods.js';
import { useResource } from '../resource.js';
import { query, setQuery } from '../router.js';
import { READ_POINTS } from '../run_store.js';

/** @typedef {import('../run_store.js').RunStore} RunStore */
/** @typedef {import('../curves.js').Axis} Axis */

/** Charts beside that of the losses, in order: series, title, color, format. */
const KNOWN_CHARTS = /** @type {[string, string, string, (value: number | null | undefined) => string][]} */ ([
  ['learning_rate', 'Learning rate', '--c3', format.significant],
  ['grad_norm', 'Gradient norm', '--c4', format.significant],
  ['extra.tokens_per_second', 'Throughput, tokens/s', '--c7', format.integer],
  ['samples_per_second', 'Throughput, rows/s', '--c7', format.significant],
  ['gpu_memory_mb', 'GPU memory, GiB', '--c6', (value) => (value == null ? '–' : value.toFixed(1))],
]);

/** @type {Record<string, string>} Titles of the charts of series whose values are sums since the metric before. */
const PER_STEP_TITLES = {
  'extra.step_seconds': 'Seconds per step',
  'extra.data_seconds': 'Wait for data per step, seconds',
  'extra.forward_seconds': 'Forward per step, seconds',
  'extra.backward_seconds': 'Backward per step, seconds',
  'extra.optimizer_seconds': 'Optimizer per step, seconds',
};

/** @param {{ store: RunStore }} props */
export function Charts({ store }) {
  void store.curvesVersion.value; // draw again with new points
  const { axis, smoothing, logScale } = readChartSettings();
  const zoom = parseZoom(query.value.get('zoom'));
  const [isAll, setAll] = useState(false);

  const starts = (store.attempts.value ?? []).map((attempt) => attempt.start_step ?? 0);
  const detail = useDetail(store, axis, zoom);
  const buildCurve = (
    /** @type {string} */ name,
    /** @type {string} */ label,
    /** @type {string} */ color,
    options = {},
  ) => {
    const recorded = store.series.get(name) ?? createSeries();
    const series = detail?.[name] ? insertDetail(recorded, detail[name]) : recorded;
    const values =
      name in PER_STEP_TITLES
        ? divideBySteps(series, store.run.value.config.logging_steps, starts)
        : name === 'gpu_memory_mb'
          ? series.values.map((value) => value && value / 1024)
          : series.values;
    return {
      name: label,
      color,
      x: computePositions(series, axis, { epoch: store.series.get('epoch'), clock: store.timesOfSteps }),
      y: values,
      ...options,
    };
  };
  const isPrediction = store.run.value.task === 'predict';
  const chartedNames = new Set(['loss', 'epoch', ...KNOWN_CHARTS.map(([name]) => name)]);
  const evals = [...store.series.keys()].filter((name) => /^eval\.eval_(.*_)?loss$/.test(name));
  const rewards = ['extra.reward', 'eval.eval_reward'].filter((name) => store.series.has(name));
  const others = [...store.series.keys()]
    .filter(
      (name) =>
        // A prediction has its scores once, at its end.
        !(isPrediction && name.startsWith('eval.')) &&
        !chartedNames.has(name) &&
        !evals.includes(name) &&
        !rewards.includes(name) &&
        hasNumbers(store, name),
    )
    .sort();
  const shownCharts = KNOWN_CHARTS.filter(
    ([name]) =>
      hasNumbers(store, name) && !(name === 'samples_per_second' && hasNumbers(store, 'extra.tokens_per_second')),
  );
  const scales = { epoch: store.series.get('epoch'), clock: store.timesOfSteps };
  const extent = computeExtent(
    [...store.series.values()].map(({ steps, values }) =>
      computePositions({ steps: [...steps.slice(0, 1), ...steps.slice(-1)], values }, axis, scales),
    ),
  );
  const common = {
    smoothing,
    zoom,
    extent,
    group: store.id,
    marks: axis === 'step' ? collectMarks(store) : [],
    onZoom: (/** @type {[number, number] | null} */ range) =>
      setQuery({ zoom: range && range.map((value) => Number(value.toPrecision(6))).join(',') }),
    ...axisFormats(axis),
  };
  const byReward = isRewarded(store.run.value.config.method) && rewards.length > 0;
  const lossChart = html`<${LineChart}
    key="loss"
    title="Loss"
    shape=${byReward ? '' : 'wide'}
    logScale=${logScale}
    format=${format.loss}
    ...${common}
    curves=${[
      buildCurve('loss', 'train', '--c1'),
      ...evals.map((name, index) => buildCurve(name, formatEvalLabel(name), `--c${(index % 7) + 2}`, { dots: true })),
    ]}
  />`;
  const rewardChart =
    rewards.length > 0 &&
    html`<${LineChart}
      key="reward"
      title="Reward"
      shape=${byReward ? 'wide' : ''}
      ...${common}
      curves=${rewards.map((name, index) =>
        buildCurve(name, name.startsWith('eval') ? 'eval' : 'train', `--c${index + 1}`, {
          dots: name.startsWith('eval'),
        }),
      )}
    />`;
  if (store.series.size === 0)
    return store.isReading('curves')
      ? html`<${Loading} what="curves" />`
      : html`<p class="box state muted">Curves appear with the first logged step.</p>`;
  return html`<div>
    <${ChartControls}>
      ${zoom
        ? html`<button type="button" class="btn small" onClick=${() => setQuery({ zoom: null })}>Show all</button>`
        : html`<span class="faint hide-s">Drag to zoom, double-click to show all</span>`}
    <//>
    <div class="charts">
      ${!isPrediction && (byReward ? [rewardChart, lossChart] : [lossChart, rewardChart])}
      ${shownCharts.map(
        ([name, title, color, text]) => html`<${LineChart}
          key=${name}
          title=${title}
          ...${common}
          smoothing=${name === 'learning_rate' || name === 'gpu_memory_mb' ? 0 : smoothing}
          logScale=${logScale && name === 'grad_norm'}
          format=${text}
          curves=${[buildCurve(name, title, color)]}
        />`,
      )}
      ${(isAll ? others : others.slice(0, 4)).map(
        (name, index) => html`<${LineChart}
          key=${name}
          title=${formatTitle(name)}
          ...${common}
          curves=${[buildCurve(name, formatTitle(name), `--c${(index % 8) + 1}`, { dots: name.startsWith('eval.') })]}
        />`,
      )}
    </div>
    ${others.length > 4 && html`<p class="row foot">
      <button type="button" class="btn small" onClick=${() => setAll(!isAll)}>
        ${isAll ? 'Fewer curves' : `${others.length - 4} more curves`}
      </button>
    </p>`}
  </div>`;
}

/**
 * The points of a zoomed part of a long run, of which the whole curves have only some.
 * @param {RunStore} store @param {Axis} axis @param {[number, number] | null} zoom
 * @returns {Record<string, import('../curves.js').Series> | undefined}
 */
function useDetail(store, axis, zoom) {
  const loss = store.series.get('loss') ?? createSeries();
  const isThinned = loss.steps.length >= READ_POINTS / 2;
  const range =
    zoom && isThinned
      ? findStepsWithin(
          loss,
          computePositions(loss, axis, { epoch: store.series.get('epoch'), clock: store.timesOfSteps }),
          zoom,
        )
      : null;
  // To the newest point there is no end: else each step of a live run would be another request.
  const lastStep = range && range[1] < loss.steps[loss.steps.length - 1] ? { to_step: range[1] } : {};
  const detailRequest = range && { from_step: range[0], ...lastStep, max_points: READ_POINTS };
  const detail = useResource(
    (signal) => get(`/v1/runs/${store.id}/metrics`, detailRequest ?? {}, signal),
    detailRequest && `${store.id} ${store.run.value.attempt} ${range[0]} ${lastStep.to_step}`,
    { keep: false },
  );
  return detail.data?.series;
}

/** @param {RunStore} store @param {string} name */
const hasNumbers = (store, name) => (store.series.get(name)?.values ?? []).some((value) => value != null);

/** @param {string} name */
const formatTitle = (name) => {
  if (name in PER_STEP_TITLES) return PER_STEP_TITLES[name];
  const words = name
    .replace(/^extra\./, '')
    .replace(/^eval\.eval_/, 'eval ')
    .replaceAll('_', ' ')
    .replace(/ mb$/, ', MiB');
  return words.charAt(0).toUpperCase() + words.slice(1);
};

/** @param {string} name Such as `eval.eval_loss` or `eval.eval_code_loss`. */
const formatEvalLabel = (name) => {
  const evalSet = name.replace(/^eval\.eval_/, '').replace(/_?loss$/, '');
  return evalSet ? `eval ${evalSet}` : 'eval';
};

/** @param {string | null} text @returns {[number, number] | null} */
export function parseZoom(text) {
  const [low, high] = (text ?? '').split(',').map(Number);
  return Number.isFinite(low) && Number.isFinite(high) && low < high ? [low, high] : null;
}

/** @param {RunStore} store @returns {import('../components/chart.js').Mark[]} */
function collectMarks(store) {
  // Of attempts from the same step, the last one is named.
  const attempts = (store.attempts.value ?? [])
    .slice(1)
    .filter(
      (attempt, index, allAttempts) =>
        attempt.start_step != null && allAttempts[index + 1]?.start_step !== attempt.start_step,
    );
  const actions = (store.actions.value ?? []).filter(
    (action) =>
      action.status === 'done' && action.step != null && ['set_learning_rate', 'extend'].includes(action.action),
  );
  return [
    ...attempts.map((attempt) => ({
      at: /** @type {number} */ (attempt.start_step),
      text: `attempt ${attempt.attempt}`,
      kind: /** @type {'attempt'} */ ('attempt'),
    })),
    ...actions.map((action) => ({
      at: /** @type {number} */ (action.step),
      text: action.action === 'extend' ? 'extended' : 'learning rate changed',
      kind: /** @type {'action'} */ ('action'),
    })),
  ];
}
