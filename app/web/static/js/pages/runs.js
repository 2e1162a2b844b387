// All runs: a live table with filters, and a selection to compare, stop, tag or delete.

import { html, useEffect, useState } from '../../vendor/preact.js';
import { get } from '../api.js';
import { Chip, Choice, Copy, STATUSES } from '../components/controls.js';
import { Icon } from '../components/icon.js';
import { PageButtons } from '../components/pages.js';
import { Empty, Loaded } from '../components/states.js';
import * as format from '../format.js';
import { useResource, useSettled } from '../resource.js';
import { query, setQuery } from '../router.js';
import { Bulk } from '../runs/bulk.js';
import { Columns, Table } from '../runs/table.js';
import { hasScope } from '../session.js';
import { followStream } from '../stream.js';

/** @import * as api from '../api_types.js' */

export const title = 'Runs';

const PAGE_SIZE = 50;
/** Steps and predictions of live runs change without an event in the stream of all runs. */
const LIVE_EVERY_MS = 5000;
const LIVE = new Set(['pending', 'initializing', 'running', 'checkpointing']);
const DEFAULT_SORT = 'live';
const SORTS = [
  ['live', 'Running first'],
  ['created_at', 'Newest first'],
  ['best', 'Best of each method'],
  ['best_eval', 'By best eval'],
  ['best_loss', 'By lowest loss'],
  ['learning_rate', 'By learning rate'],
  ['seconds', 'By time'],
  ['step', 'By steps'],
  ['name', 'By name'],
];
/** What runs do: value of the address, text. Trainings are shown unless others are asked for. */
const TASKS = /** @type {[string, string][]} */ ([
  ['train', 'Training'],
  ['evaluate', 'Evaluations'],
  ['predict', 'Predictions'],
  ['export', 'Exports'],
  ['serve', 'Serving'],
  ['all', 'All'],
]);

/** Filters of the address, as the API takes them. */
function readFilters() {
  const params = query.value;
  const task = params.get('task') ?? 'train';
  return {
    task: task === 'all' ? null : task,
    search: params.get('search'),
    status: params.getAll('status'),
    experiment_id: params.get('experiment'),
    base_model: params.get('model'),
    method: params.get('method'),
    tag: params.get('tag'),
    dataset_id: params.get('dataset'),
  };
}

export default function Runs() {
  const params = query.value;
  const picked = params.getAll('pick');
  const sort = params.get('sort') ?? DEFAULT_SORT;
  const order = params.get('order');
  const after = params.get('after');
  const request = { ...readFilters(), sort, order, after, limit: PAGE_SIZE, view: 'row' };
  const { status: _status, ...others } = readFilters();
  const [isLive, setLive] = useState(true);
  const list = useResource((signal) => get('/v1/runs', request, signal), JSON.stringify(request), {
    everyMs: isLive ? LIVE_EVERY_MS : undefined,
  });
  const counts = useResource((signal) => get('/v1/runs/counts', others, signal), JSON.stringify(others));
  const experiments = useResource((signal) => get('/v1/experiments', { limit: 200 }, signal), 'experiments');
  const isAnyLive = (list.data?.data ?? []).some((/** @type {api.RunRow} */ run) => LIVE.has(run.status));
  useEffect(() => setLive(isAnyLive), [isAnyLive]);

  const reload = () => {
    list.reload();
    counts.reload();
  };

  useEffect(() => {
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const close = followStream({
      path: '/v1/events',
      after: null,
      types: ['status', 'end'],
      onEvent: (type) => {
        if (type === 'cursor' || timer !== undefined) return;
        timer = setTimeout(() => {
          timer = undefined;
          reload();
        }, 400);
      },
    });
    return () => {
      clearTimeout(timer);
      close();
    };
  }, []);

  const setPicked = (/** @type {string[]} */ ids) => setQuery({ pick: ids });
  const names = new Map(
    (experiments.data?.data ?? []).map((/** @type {any} */ experiment) => [experiment.id, experiment.name]),
  );
  const { task, ...filters } = readFilters();
  const isFiltered = Object.values(filters).some((value) => (Array.isArray(value) ? value.length : value));
  return html`
    <div class=${picked.length ? 'head center sticky selection' : 'head center'}>
      <h1 class="grow">Runs</h1>
      <${Bulk} picked=${picked} onClear=${() => setQuery({ pick: null })} onChanged=${reload} />
    </div>
    <${Filters} counts=${counts.data?.counts ?? {}} experiments=${experiments.data?.data ?? []} />
    <${Loaded} resource=${list} what="runs">
      ${(/** @type {api.Page<api.RunRow>} */ page) =>
        page.data.length === 0
          ? html`<section class="box"><${NoRuns} task=${task} isFiltered=${isFiltered || after} /></section>`
          : html`<${Table}
              runs=${page.data}
              picked=${picked}
              onPick=${setPicked}
              sort=${sort}
              order=${order}
              experiments=${names}
            />`}
    <//>
    <${PageButtons} after=${after} page=${list.data}>
      <span class="sub num">
        ${list.data &&
        `${format.integer(list.data.data.length)} of ${format.integer(counts.data?.total ?? list.data.data.length)}`}
      </span>
    <//>
  `;
}

/** @param {{ task: string | null, isFiltered: boolean }} props */
function NoRuns({ task, isFiltered }) {
  if (isFiltered)
    return html`<${Empty} title="No run matches the filters.">
      <button
        type="button"
        class="btn small"
        onClick=${() =>
          setQuery({
            search: null,
            status: null,
            experiment: null,
            model: null,
            method: null,
            tag: null,
            dataset: null,
            after: null,
          })}
      >
        Remove the filters
      </button>
    <//>`;
  if (task === 'evaluate')
    return html`<${Empty} title="There are no evaluations yet.">
      <p class="muted"><code>anneal eval MODEL DATASET</code> measures a model on held-out data, without training.</p>
    <//>`;
  if (task === 'predict')
    return html`<${Empty} title="There are no predictions yet.">
      <p class="muted"><code>anneal predict MODEL DATASET</code> answers the rows of a dataset and scores them.</p>
    <//>`;
  if (task === 'export')
    return html`<${Empty} title="There are no exports yet.">
      <p class="muted">“Export …” among the checkpoints of a run writes a model from one of them.</p>
    <//>`;
  if (task === 'serve')
    return html`<${Empty} title="There are no serving runs yet.">
      <p class="muted"><code>POST /openai/v1/chat/completions</code> starts one with the first question to a model.</p>
    <//>`;
  return html`<${FirstSteps} />`;
}

/** Lines of a dataset that can be saved as they are, for a first run. */
const SAMPLE_ROWS = [
  ['What does annealing do?', 'It heats a material and lets it cool slowly, so that it becomes less brittle.'],
  ['Why fine-tune a model?', 'To make it good at one task, in one style, with far less data than it was trained on.'],
]
  .map(([question, answer]) =>
    JSON.stringify({
      messages: [
        { role: 'user', content: question },
        { role: 'assistant', content: answer },
      ],
    }),
  )
  .join('\n');

/** What an installation without runs shows: the way to the first one, with data to try it. */
const FirstSteps = () => html`<div class="state first">
  <h2>There are no runs yet.</h2>
  <ol class="steps">
    <li>
      <p>
        <b>A dataset.</b> One JSON object a line; this sample, saved as <code>chats.jsonl</code>, is enough to try it.
      </p>
      <pre class="code" tabindex="0" aria-label="Sample of a dataset">${SAMPLE_ROWS}</pre>
      ${hasScope('write') && html`<p class="row wrap">
        <a class="btn small" href="/datasets">Upload a dataset</a>
        <${Copy} text=${SAMPLE_ROWS} shown="Copy the sample" label="Copy the sample" />
      </p>`}
    </li>
    <li>
      <p>
        <b>A model.</b> A folder below the models root, or a model of the Hugging Face Hub. Without
        either, <code>anneal models create tiny</code> makes a small one with random weights on this machine.
      </p>
    </li>
    <li>
      <p>
        <b>A run.</b> Of this model on this
        dataset.${hasScope('write') ? '' : html` A key with the scope <code>write</code> can start one.`}
      </p>
      ${hasScope('write') && html`<p><a class="btn primary small" href="/new">New run</a></p>`}
    </li>
  </ol>
</div>`;

/** @param {{ counts: Record<string, number>, experiments: { id: string, name: string }[] }} props */
function Filters({ counts, experiments }) {
  const params = query.value;
  const [text, setText] = useState(params.get('search') ?? '');
  const settled = useSettled(text.trim(), 250);
  const inAddress = params.get('search') ?? '';
  useEffect(() => {
    if (settled !== (query.peek().get('search') ?? '')) setQuery({ search: settled || null, after: null });
  }, [settled]);
  useEffect(() => {
    if (inAddress !== text.trim()) setText(inAddress);
  }, [inAddress]);
  const statuses = params.getAll('status');
  const toggleStatus = (/** @type {string} */ status) =>
    setQuery({
      status: statuses.includes(status)
        ? statuses.filter((otherStatus) => otherStatus !== status)
        : [...statuses, status],
      after: null,
    });
  const sort = params.get('sort') ?? DEFAULT_SORT;
  return html`<div class="row wrap filters">
    <${Choice}
      label="Kind of runs"
      value=${params.get('task') ?? 'train'}
      options=${TASKS}
      onChange=${(/** @type {string} */ value) => setQuery({ task: value === 'train' ? null : value, after: null })}
    />
    <input
      type="search"
      placeholder="Name, tag or ID"
      aria-label="Search runs by name, tag or ID"
      value=${text}
      onInput=${(/** @type {any} */ event) => setText(event.target.value)}
    />
    <select
      aria-label="Experiment"
      value=${params.get('experiment') ?? ''}
      onChange=${(/** @type {any} */ event) => setQuery({ experiment: event.target.value, after: null })}
    >
      <option value="">All experiments</option>
      ${experiments.map((experiment) => html`<option value=${experiment.id}>${experiment.name}</option>`)}
    </select>
    <select
      aria-label="Order"
      value=${sort}
      onChange=${(/** @type {any} */ event) =>
        setQuery({ sort: event.target.value === DEFAULT_SORT ? null : event.target.value, order: null, after: null })}
    >
      ${SORTS.map(
        ([value, name]) => html`<option value=${value}>
          ${value === 'created_at' && params.get('order') === 'asc' ? 'Oldest first' : name}
        </option>`,
      )}
    </select>
    ${['model', 'method', 'tag', 'dataset'].map(
      (name) =>
        params.get(name) &&
        html`<button
          type="button"
          class="btn small"
          title="Remove this filter"
          onClick=${() => setQuery({ [name]: null, after: null })}
        >
          <span class="clip">
            ${name}: ${name === 'dataset' ? format.shortId(params.get(name) ?? '') : params.get(name)}
          </span>
          <${Icon} name="cross" />
        </button>`,
    )}
    <${Columns} />
    ${sort === 'best' && html`<span class="sub">
      Losses and rewards of different methods are not compared: each method has a list of its own.
    </span>`}
    <span class="grow"></span>
    <span class="row wrap" role="group" aria-label="Only runs with these statuses">
      ${STATUSES.filter((status) => counts[status] || statuses.includes(status)).map(
        (status) => html`<button
          type="button"
          class="btn quiet small count"
          aria-pressed=${String(statuses.includes(status))}
          onClick=${() => toggleStatus(status)}
        >
          <${Chip} status=${status} />
          <span class="num">${format.integer(counts[status] ?? 0)}</span>
        </button>`,
      )}
    </span>
  </div>`;
}
