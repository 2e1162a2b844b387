// Table of runs: columns to choose, headers that sort, and a selection.

import { html, signal } from '../../vendor/preact.js';
import { Bar, Chip, Menu, Spark } from '../components/controls.js';
import { Icon } from '../components/icon.js';
import * as format from '../format.js';
import { describeGroup, isRewarded } from '../methods.js';
import { useNow } from '../resource.js';
import { setQuery } from '../router.js';

/** @import * as api from '../api_types.js' */

/**
 * @typedef {object} Column
 * @property {string} title
 * @property {string} [sort] Name of the order by this column.
 * @property {'asc' | 'desc'} [first] Direction of the first click; none for an order with one direction.
 * @property {string} [kind] Classes of its cells.
 * @property {boolean} [isOptional] True for a column that is hidden unless it is chosen.
 * @property {(run: api.RunRow, context: { now: number, experiments: Map<string, string> }) => any} cell
 */

/** @type {Record<string, Column>} Columns after that of the name, in order. */
const COLUMNS = {
  status: { title: 'Status', sort: 'live', cell: (run) => html`<${Chip} status=${run.status} />` },
  progress: {
    title: 'Progress',
    sort: 'step',
    first: 'desc',
    kind: 'hide-s progress',
    cell: (run) => html`<${ProgressCell} run=${run} />`,
  },
  curve: {
    title: 'Loss or reward',
    cell: (run) => html`<${Spark}
      values=${run.rewards ?? run.losses ?? []}
      status=${run.status}
      what=${run.rewards ? 'Reward' : 'Loss'}
    />`,
  },
  best_loss: {
    title: 'Lowest loss',
    sort: 'best_loss',
    first: 'asc',
    kind: 'right num hide-s',
    cell: (run) =>
      isRewarded(run.method)
        ? html`<span class="faint" title="Its progress shows in rewards.">–</span>`
        : format.loss(run.best_loss),
  },
  best_eval: {
    title: 'Best eval',
    sort: 'best_eval',
    first: 'asc',
    kind: 'right num hide-s nowrap',
    cell: (run) => html`
      ${run.best_eval != null && isRewarded(run.method) && html`<span class="sub">reward </span>`}
      ${format.loss(run.best_eval)}
    `,
  },
  learning_rate: {
    title: 'Learning rate',
    sort: 'learning_rate',
    first: 'desc',
    kind: 'right num hide-s',
    isOptional: true,
    cell: (run) => format.significant(run.learning_rate),
  },
  speed: { title: 'Tokens/s', kind: 'right num hide-s', cell: (run) => format.integer(run.tokens_per_second) },
  time: {
    title: 'Time',
    sort: 'seconds',
    first: 'desc',
    kind: 'nowrap num',
    cell: (run, { now }) => html`<${TimeCell} run=${run} now=${now} />`,
  },
  experiment: {
    title: 'Experiment',
    kind: 'hide-s',
    isOptional: true,
    cell: (run, { experiments }) => html`<a
      class="clip"
      href=${`/?experiment=${run.experiment_id}`}
      title=${experiments.get(run.experiment_id)}
    >
      ${experiments.get(run.experiment_id) ?? format.shortId(run.experiment_id)}
    </a>`,
  },
  tags: {
    title: 'Tags',
    kind: 'hide-s',
    isOptional: true,
    cell: (run) =>
      (run.tags ?? []).map(
        (/** @type {string} */ tag) => html`<a class="tag" href=${`/?tag=${encodeURIComponent(tag)}`}>${tag}</a> `,
      ),
  },
  worker: { title: 'Worker', kind: 'muted hide-s', cell: (run) => run.worker ?? '–' },
  by: {
    title: 'By',
    kind: 'muted hide-s',
    cell: (run) => html`<span class="clip" title=${run.by}>${run.by ?? '–'}</span>`,
  },
  created: {
    title: 'Created',
    sort: 'created_at',
    first: 'desc',
    kind: 'right muted num nowrap hide-s',
    cell: (run, { now }) => html`<span title=${run.created_at}>${format.ago(run.created_at, now)}</span>`,
  },
};

const STORAGE_KEY = 'anneal.run-columns';

/** @returns {string[]} */
function readStoredColumns() {
  try {
    const names = JSON.parse(localStorage.getItem(STORAGE_KEY) ?? '');
    if (Array.isArray(names)) return Object.keys(COLUMNS).filter((name) => names.includes(name));
  } catch {
    // Nothing is stored, or nothing that can be read.
  }
  return Object.keys(COLUMNS).filter((name) => !COLUMNS[name].isOptional);
}

const shownColumns = signal(readStoredColumns());

/** @param {string} name */
function toggleColumn(name) {
  const shownNames = shownColumns.value.includes(name)
    ? shownColumns.value.filter((columnName) => columnName !== name)
    : [...shownColumns.value, name];
  shownColumns.value = Object.keys(COLUMNS).filter((columnName) => shownNames.includes(columnName));
  localStorage.setItem(STORAGE_KEY, JSON.stringify(shownColumns.value));
}

/** Menu of the columns. */
export const Columns = () => html`<${Menu} button=${html`Columns<${Icon} name="down" />`} label="Columns of the table">
  ${Object.entries(COLUMNS).map(
    ([name, { title }]) => html`<button
      type="button"
      aria-pressed=${String(shownColumns.value.includes(name))}
      onClick=${(/** @type {Event} */ event) => {
        event.stopPropagation();
        toggleColumn(name);
      }}
    >
      <span class="row">
        <span class="grow">${title}</span>
        ${shownColumns.value.includes(name) && html`<${Icon} name="check" />`}
      </span>
    </button>`,
  )}
<//>`;

/**
 * @param {{
 *   runs: api.RunRow[], picked: string[], onPick: (ids: string[]) => void, sort: string, order: string | null,
 *   experiments: Map<string, string>,
 * }} props
 */
export function Table({ runs, picked, onPick, sort, order, experiments }) {
  const now = useNow(10_000);
  const columns = shownColumns.value.map((name) => COLUMNS[name]);
  const ids = runs.map((run) => run.id);
  const areAllPicked = ids.every((id) => picked.includes(id));
  const toggleRun = (/** @type {string} */ id) =>
    onPick(picked.includes(id) ? picked.filter((otherId) => otherId !== id) : [...picked, id]);
  const toggleAll = () =>
    onPick(areAllPicked ? picked.filter((id) => !ids.includes(id)) : [...new Set([...picked, ...ids])]);
  return html`<section class="box scroll" tabindex="0" role="region" aria-label="Runs">
    <table class="table cards">
      <thead>
        <tr>
          <th class="pick">
            <input
              type="checkbox"
              aria-label="Select all runs of this page"
              checked=${areAllPicked}
              onChange=${toggleAll}
            />
          </th>
          <${Header} column=${{ title: 'Run', sort: 'name', first: 'asc' }} sort=${sort} order=${order} />
          ${columns.map(
            (column) => html`<${Header} key=${column.title} column=${column} sort=${sort} order=${order} />`,
          )}
        </tr>
      </thead>
      <tbody>
        ${runs.map(
          (run, index) => html`
            ${sort === 'best' && describeGroup(run) !== (index > 0 && describeGroup(runs[index - 1])) && html`<tr
              class="group"
              key=${describeGroup(run)}
            >
              <th scope="rowgroup" colspan=${columns.length + 2}>${describeGroup(run)}</th>
            </tr>`}
            <tr key=${run.id} aria-selected=${String(picked.includes(run.id))}>
              <td class="pick">
                <input
                  type="checkbox"
                  aria-label=${`Select ${run.name}`}
                  checked=${picked.includes(run.id)}
                  onChange=${() => toggleRun(run.id)}
                />
              </td>
              <td class="what">
                <a class="name" href=${`/runs/${run.id}`}>${run.name}</a>
                <div class="sub clip">
                  ${[run.task && run.task !== 'train' ? run.task : run.method, run.base_model]
                    .filter(Boolean)
                    .join(' · ')}
                </div>
              </td>
              ${columns.map(
                (column) => html`<td key=${column.title} class=${column.kind}>
                  ${column.cell(run, { now, experiments })}
                </td>`,
              )}
            </tr>
          `,
        )}
      </tbody>
    </table>
  </section>`;
}

/**
 * @param {{
 *   column: { title: string, sort?: string, first?: 'asc' | 'desc', kind?: string }, sort: string,
 *   order: string | null,
 * }} props
 */
function Header({ column, sort, order }) {
  const { title, sort: sortKey, first, kind = '' } = column;
  const place = kind.includes('right') ? 'right' : undefined;
  if (!sortKey) return html`<th class=${place}>${title}</th>`;
  const isSorted = sortKey === sort;
  const direction = isSorted ? (order ?? first) : undefined;
  const next = isSorted && first ? (direction === 'asc' ? 'desc' : 'asc') : first;
  const state = !isSorted
    ? undefined
    : direction === 'asc'
      ? 'ascending'
      : direction === 'desc'
        ? 'descending'
        : 'other';
  const sortBy = () =>
    setQuery({ sort: sortKey === 'live' ? null : sortKey, order: next === first ? null : next, after: null });
  return html`<th class=${place} aria-sort=${state}>
    <button type="button" class="sort" onClick=${sortBy}>
      ${title}
      ${isSorted && html`<span class=${direction === 'asc' ? 'turned' : ''}><${Icon} name="down" /></span>`}
    </button>
  </th>`;
}

/** @param {{ run: api.RunRow }} props */
const ProgressCell = ({ run }) => {
  const step = run.step ?? 0;
  if (!run.total_steps) return html`<span class="sub num">${step ? `step ${format.integer(step)}` : '–'}</span>`;
  return html`
    <div class="row sub num between">
      <span>
        ${step
          ? `${format.integer(step)} of ${format.integer(run.total_steps)}`
          : `${format.integer(run.total_steps)} steps`}
      </span>
      <span>${format.percent(step, run.total_steps)}</span>
    </div>
    <${Bar} value=${step / run.total_steps} status=${run.status} label=${`Progress of ${run.name}`} />
  `;
};

/** @param {{ run: api.RunRow, now: number }} props */
const TimeCell = ({ run, now }) => {
  if (run.status === 'failed') return html`<span class="error-text">${formatCode(run.reason ?? 'failed')}</span>`;
  if (run.status === 'pending') {
    if (run.reason && run.reason !== 'queued') return html`<span class="muted">${formatCode(run.reason)}</span>`;
    return html`<span class="muted">
      ${run.starts_at ? `starts ${formatTimeLeft(run.starts_at, now)}` : 'in the queue'}
    </span>`;
  }
  if (run.finished_at)
    return html`<span class="muted">
      ${run.started_at
        ? `took ${format.duration((Date.parse(run.finished_at) - Date.parse(run.started_at)) / 1000)}`
        : 'never started'}
    </span>`;
  return run.finishes_at
    ? html`<b>${format.duration((Date.parse(run.finishes_at) - now) / 1000)}</b> left`
    : html`<span class="muted">–</span>`;
};

/** @param {string} time @param {number} now */
const formatTimeLeft = (time, now) =>
  Date.parse(time) > now ? `in ${format.duration((Date.parse(time) - now) / 1000)}` : 'soon';

/** @param {string} code A code in snake_case, as words. */
const formatCode = (code) => {
  const words = code.replaceAll('_', ' ');
  return words.charAt(0).toUpperCase() + words.slice(1);
};
