// Where a run stands: figures, and the timeline of its attempts.

import { html } from '../../vendor/preact.js';
import { Bar, labelStatus } from '../components/controls.js';
import { Prose } from '../components/states.js';
import { findLastValue } from '../curves.js';
import * as format from '../format.js';
import { isRewarded } from '../methods.js';
import { useNow } from '../resource.js';
import { separateMarks, buildTimeline } from './timeline.js';

/** @import * as api from '../api_types.js' */

/** @typedef {import('../run_store.js').RunStore} RunStore */

/** @param {{ label: string, value: any, unit?: string, note?: string | false | null, children?: any }} props */
const Tile = ({ label, value, unit, note, children }) => html`<div class="tile">
  <div class="what">${label}</div>
  <div class="big">${value}${unit && html` <small>${unit}</small>`}</div>
  ${note && html`<div class="note" title=${note}><${Prose} text=${note} /></div>`}
  ${children}
</div>`;

/** @param {{ label: string, run: api.Run }} props */
const ProgressTile = ({ label, run }) => html`<${Tile}
  label=${label}
  value=${format.integer(run.current_step)}
  unit=${run.total_steps ? `of ${format.integer(run.total_steps)}` : ''}
>
  ${run.total_steps != null && run.total_steps > 0 && html`<${Bar}
    value=${run.current_step / run.total_steps}
    status=${run.status}
    label="Progress"
  />`}
<//>`;

/** @param {{ store: RunStore }} props */
export function Summary({ store }) {
  const run = store.run.value;
  const now = useNow(1000);
  void store.curvesVersion.value; // draw again with new points
  const series = (/** @type {string} */ name) => store.series.get(name);
  const latest = (/** @type {string} */ name) => findLastValue(series(name)?.values ?? []);
  const [evalName, pickEval] = isRewarded(run.config.method) ? ['eval_reward', Math.max] : ['eval_loss', Math.min];
  const latestEval = latest(`eval.${evalName}`);
  const facts = describeTokens(run);
  if (run.task === 'predict')
    return html`<section class="box summary" aria-label="State of the run">
      <${PredictionTiles} store=${store} now=${now} />
      <${Timeline} store=${store} now=${now} />
    </section>`;
  const tokens = latest('extra.tokens_per_second');
  const memory = store.device.value?.memory_mb ?? latest('gpu_memory_mb');
  return html`<section class="box summary" aria-label="State of the run">
    <div class="tiles">
      <${ProgressTile} label="Step" run=${run} />
      <${TimeTile} store=${store} now=${now} />
      ${isRewarded(run.config.method)
        ? html`<${Tile}
            label="Train reward"
            value=${format.loss(latest('extra.reward'))}
            note=${latest('loss') != null && `loss ${format.loss(latest('loss'))}`}
          />`
        : html`<${Tile}
            label="Train loss"
            value=${format.loss(latest('loss'))}
            note=${run.best_loss != null && `lowest ${format.loss(pickBest(Math.min, run.best_loss, latest('loss')))}`}
          />`}
      <${Tile}
        label=${isRewarded(run.config.method) ? 'Eval reward' : 'Eval loss'}
        value=${format.loss(latest(`eval.${evalName}`))}
        note=${run.best_eval != null && `best ${format.loss(pickBest(pickEval, run.best_eval, latestEval))}`}
      />
      <${Tile}
        label="Throughput"
        value=${tokens != null ? format.integer(tokens) : format.significant(latest('samples_per_second'))}
        unit=${tokens != null ? 'tokens/s' : 'rows/s'}
        note=${latest('extra.mfu') != null && `MFU ${format.percent(/** @type {number} */ (latest('extra.mfu')), 1)}`}
      />
      ${memory != null && html`<${Tile}
        label="GPU memory"
        value=${format.gib(memory)}
        unit="GiB"
        note=${run.estimate?.memory_mb?.total && `estimated ${format.gib(run.estimate.memory_mb.total)} GiB`}
      />`}
      <${Tile}
        label="Epoch"
        value=${(run.current_epoch ?? 0).toFixed(2)}
        unit=${run.config.epochs && !run.config.max_steps ? `of ${run.config.epochs}` : ''}
        note=${facts}
      />
    </div>
    <${Timeline} store=${store} now=${now} />
  </section>`;
}

/** Metrics of a prediction that are no scores. */
const COUNTS = new Set(['score', 'rows', 'completion_length', 'completions_cut']);

/** @param {{ store: RunStore, now: number }} props */
function PredictionTiles({ store, now }) {
  const run = store.run.value;
  const latest = (/** @type {string} */ name) => findLastValue(store.series.get(name)?.values ?? []);
  // The last metric of a prediction may be of a moment without a new row.
  const latestSpeed = (/** @type {string} */ name) =>
    store.series.get(name)?.values.findLast((value) => value != null && value > 0) ?? null;
  const scores = [...store.series.keys()]
    .filter((name) => name.startsWith('eval.eval_'))
    .map((name) => name.slice('eval.eval_'.length))
    .filter((name) => !COUNTS.has(name));
  const length = latest('eval.eval_completion_length');
  const cut = latest('eval.eval_completions_cut');
  return html`<div class="tiles">
    <${ProgressTile} label="Rows" run=${run} />
    <${TimeTile} store=${store} now=${now} />
    ${scores.map(
      (name) => html`<${Tile}
        key=${name}
        label=${name.replaceAll('_', ' ')}
        value=${format.significant(latest(`eval.eval_${name}`))}
      />`,
    )}
    <${Tile}
      label="Throughput"
      value=${format.significant(latestSpeed('samples_per_second'))}
      unit="rows/s"
      note=${latestSpeed('extra.tokens_per_second') != null &&
      `${format.integer(latestSpeed('extra.tokens_per_second'))} tokens/s`}
    />
    ${length != null && html`<${Tile}
      label="Answer length"
      value=${format.significant(length)}
      unit="tokens"
      note=${cut ? `${format.percent(cut, 1)} are cut` : null}
    />`}
  </div>`;
}

/**
 * The run is read some seconds after its newest point arrived, which may be the best one.
 * @param {(...values: number[]) => number} pick @param {number} recorded @param {number | null} newest
 */
const pickBest = (pick, recorded, newest) => (newest == null ? recorded : pick(recorded, newest));

/** @param {api.Run} run */
function describeTokens(run) {
  const trained = run.measured?.tokens;
  return trained ? `${format.integer(trained)} tokens` : null;
}

/** @param {{ store: RunStore, now: number }} props */
function TimeTile({ store, now }) {
  const run = store.run.value;
  const progress = store.progress.value;
  const formatTimeLeft = (/** @type {string} */ time) =>
    Date.parse(time) > now ? `in ${format.duration((Date.parse(time) - now) / 1000)}` : 'soon';
  if (run.finished_at) {
    const duration =
      run.started_at && format.duration((Date.parse(run.finished_at) - Date.parse(run.started_at)) / 1000);
    const reason =
      run.end_reason && run.end_reason !== 'finished' ? run.end_reason.replaceAll('_', ' ') : labelStatus(run.status);
    return html`<${Tile}
      label=${duration ? 'Took' : 'Started'}
      value=${duration ?? 'never'}
      note=${`${reason}, ${format.clock(run.finished_at, now)}`}
    />`;
  }
  const prediction = run.prediction;
  if (run.status === 'pending') {
    const note = run.pending_reason ? 'It cannot start now.' : (prediction?.basis ?? 'Waits for a free device.');
    return html`<${Tile}
      label="Starts"
      value=${prediction?.start_at ? formatTimeLeft(prediction.start_at) : 'in the queue'}
      note=${note}
    />`;
  }
  const phase =
    progress && progress.phase !== 'training'
      ? describePhase(progress)
      : prediction && `${format.clock(prediction.finish_at, now)}, ${prediction.confidence} confidence`;
  return html`<${Tile}
    label="ETA"
    value=${prediction?.finish_at ? formatTimeLeft(prediction.finish_at) : '–'}
    note=${phase || 'Not predictable yet.'}
  />`;
}

/** @param {api.ProgressEvent} progress */
function describePhase(progress) {
  const part = progress.total ? ` ${format.percent(progress.done ?? 0, progress.total)}` : '';
  return `${progress.phase}${part}${progress.message ? `: ${progress.message}` : ''}`;
}

/** Width of a mark as a part of the line of a laptop's screen. */
const MARK_WIDTH = 0.014;
/** Part of the line below which a segment has no label. */
const NARROW = 0.06;
const GLYPHS = {
  checkpoint: 'M6.5 2l4.5 4.5L6.5 11 2 6.5z',
  best: 'M6.5 1l1.6 3.5 3.9.4-2.9 2.6.8 3.9-3.4-2-3.4 2 .8-3.9L1 4.9l3.9-.4z',
  lost: 'M6.5 1.5L12 11.5H1z',
  action: 'M3 3h7v7H3z',
};
const WORDS = { checkpoint: 'Checkpoint', best: 'Best checkpoint', lost: 'Attempt lost', action: 'Action or repair' };

/** @param {{ store: RunStore, now: number }} props */
function Timeline({ store, now }) {
  const attempts = store.attempts.value;
  const run = store.run.value;
  if (!attempts) return null;
  const timeline = buildTimeline(
    run,
    attempts,
    { checkpoints: store.checkpoints.value ?? [], actions: store.actions.value ?? [] },
    now,
  );
  const leftOf = (/** @type {number} */ time) => `${(100 * (time - timeline.from)) / (timeline.to - timeline.from)}%`;
  const widthOf = (/** @type {number} */ from, /** @type {number} */ to) =>
    `${(100 * (to - from)) / (timeline.to - timeline.from)}%`;
  const shownKinds = new Set(timeline.marks.map((mark) => mark.kind));
  return html`<div class="timeline">
    <div class="track" role="img" aria-label=${timeline.segments.map((segment) => segment.about).join('; ')}>
      ${timeline.segments.map(
        (segment) => html`<div
          class="seg-t"
          data-s=${segment.kind}
          title=${segment.about}
          style=${{ left: leftOf(segment.from), width: widthOf(segment.from, segment.to) }}
        >
          ${segment.to - segment.from > NARROW * (timeline.to - timeline.from) && segment.label}
        </div>`,
      )}
    </div>
    <div class="marks" aria-hidden="true">
      ${separateMarks(timeline.marks, (timeline.to - timeline.from) * MARK_WIDTH).map(
        (mark) => html`<span class="mark" data-k=${mark.kind} title=${mark.about} style=${{ left: leftOf(mark.at) }}>
          <svg viewBox="0 0 13 13"><path d=${GLYPHS[mark.kind]} /></svg>
        </span>`,
      )}
    </div>
    <div class="row wrap ends">
      <span>${format.clock(timeline.from, now)}</span>
      <span class="grow"></span>
      <span class="legend" aria-hidden="true">
        ${Object.entries(WORDS)
          .filter(([kind]) => shownKinds.has(/** @type {any} */ (kind)))
          .map(
            ([kind, word]) => html`<span>
              <i class="mark" data-k=${kind}>
                <svg viewBox="0 0 13 13"><path d=${GLYPHS[/** @type {keyof typeof GLYPHS} */ (kind)]} /></svg>
              </i>
              ${word}
            </span>`,
          )}
      </span>
      <span class="grow"></span>
      <span>
        ${timeline.isPredicted
          ? `about ${format.clock(timeline.to, now)}`
          : run.finished_at
            ? format.clock(timeline.to, now)
            : 'now'}
      </span>
    </div>
  </div>`;
}
