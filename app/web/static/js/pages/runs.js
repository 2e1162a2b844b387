// All runs: a live table with filters, and a selection to compare.

import { html, useEffect, useState } from '../../vendor/preact.js';
import { get } from '../api.js';
import { Bar, Chip, Spark, STATUSES } from '../components/controls.js';
import { Icon } from '../components/icon.js';
import { Empty, Loaded } from '../components/states.js';
import * as format from '../format.js';
import { useNow, useResource, useSettled } from '../resource.js';
import { query, setQuery } from '../router.js';
import { may } from '../session.js';
import { follow } from '../stream.js';

export const title = 'Runs';

const PAGE_SIZE = 50;
const MOST_COMPARED = 20;
/** Steps and predictions of live runs change without an event in the stream of all runs. */
const LIVE_EVERY_MS = 5000;
const LIVE = new Set(['pending', 'initializing', 'running', 'checkpointing']);
const SORTS = [
  ['created_at', 'Newest first'],
  ['best', 'Best first'],
];

/** Filters of the address, as the API takes them. */
function filters() {
  const asked = query.value;
  return {
    search: asked.get('search'),
    status: asked.getAll('status'),
    experiment_id: asked.get('experiment'),
    base_model: asked.get('model'),
    method: asked.get('method'),
    tag: asked.get('tag'),
    dataset_id: asked.get('dataset'),
  };
}

export default function Runs() {
  const asked = query.value;
  const picked = asked.getAll('pick');
  const sort = asked.get('sort') ?? 'created_at';
  const after = asked.get('after');
  const wanted = { ...filters(), sort, after, limit: PAGE_SIZE, view: 'row' };
  const { status: _status, ...others } = filters();
  const [isLive, setLive] = useState(true);
  const list = useResource((signal) => get('/v1/runs', wanted, signal), JSON.stringify(wanted), { everyMs: isLive ? LIVE_EVERY_MS : undefined });
  const counts = useResource((signal) => get('/v1/runs/counts', others, signal), JSON.stringify(others));
  const experiments = useResource((signal) => get('/v1/experiments', { limit: 200 }, signal), 'experiments');
  const isAnyLive = (list.data?.data ?? []).some((/** @type {any} */ run) => LIVE.has(run.status));
  useEffect(() => setLive(isAnyLive), [isAnyLive]);

  useEffect(() => {
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const close = follow({
      path: '/v1/events',
      after: null,
      types: ['status', 'end'],
      onEvent: (type) => {
        if (type === 'cursor' || timer !== undefined) return;
        timer = setTimeout(() => {
          timer = undefined;
          list.reload();
          counts.reload();
        }, 400);
      },
    });
    return () => {
      clearTimeout(timer);
      close();
    };
  }, []);

  const pick = (/** @type {string} */ id) => setQuery({ pick: picked.includes(id) ? picked.filter((one) => one !== id) : [...picked, id] });
  const isFiltered = Object.values(filters()).some((value) => (Array.isArray(value) ? value.length : value));
  return html`<div class="head center">
      <h1 class="grow">Runs</h1>
      <div class="acts">
        ${picked.length > 0 && html`<button type="button" class="btn quiet" onClick=${() => setQuery({ pick: null })}>Clear selection</button>`}
        ${picked.length >= 2 && picked.length <= MOST_COMPARED
          ? html`<a class="btn" href=${`/compare?ids=${picked.join(',')}`}>Compare ${picked.length} runs</a>`
          : html`<button type="button" class="btn" disabled title=${`Select 2 to ${MOST_COMPARED} runs`}>Compare</button>`}
      </div>
    </div>
    <${Filters} counts=${counts.data?.counts ?? {}} experiments=${experiments.data?.data ?? []} />
    <${Loaded} resource=${list} what="runs">
      ${(/** @type {any} */ page) => page.data.length === 0
        ? html`<section class="box"><${NoRuns} isFiltered=${isFiltered || after} /></section>`
        : html`<${Table} runs=${page.data} picked=${picked} onPick=${pick} />`}
    <//>
    <div class="row foot">
      <span class="sub num">${list.data && `${format.integer(list.data.data.length)} of ${format.integer(counts.data?.total ?? list.data.data.length)}`}</span>
      <span class="grow"></span>
      ${after && html`<button type="button" class="btn small" onClick=${() => setQuery({ after: null })}>First page</button>`}
      ${list.data?.has_more && html`<button type="button" class="btn small" onClick=${() => { setQuery({ after: list.data.data.at(-1).id }); scrollTo(0, 0); }}>Next page</button>`}
    </div>`;
}

/** @param {{ isFiltered: boolean }} props */
const NoRuns = ({ isFiltered }) =>
  isFiltered
    ? html`<${Empty} title="No run matches the filters."><button type="button" class="btn small" onClick=${() => setQuery({ search: null, status: null, experiment: null, model: null, method: null, tag: null, dataset: null, after: null })}>Remove the filters</button><//>`
    : html`<${Empty} title="There are no runs yet.">
        <p class="muted">Upload a dataset, then start a run on it.</p>
        ${may('write') && html`<p class="row"><a class="btn" href="/datasets">Upload a dataset</a><a class="btn primary" href="/new">New run</a></p>`}
      <//>`;

/** @param {{ counts: Record<string, number>, experiments: { id: string, name: string }[] }} props */
function Filters({ counts, experiments }) {
  const asked = query.value;
  const [text, setText] = useState(asked.get('search') ?? '');
  const settled = useSettled(text.trim(), 250);
  const inAddress = asked.get('search') ?? '';
  useEffect(() => {
    if (settled !== (query.peek().get('search') ?? '')) setQuery({ search: settled || null, after: null });
  }, [settled]);
  useEffect(() => {
    if (inAddress !== text.trim()) setText(inAddress);
  }, [inAddress]);
  const statuses = asked.getAll('status');
  const flip = (/** @type {string} */ status) =>
    setQuery({ status: statuses.includes(status) ? statuses.filter((one) => one !== status) : [...statuses, status], after: null });
  return html`<div class="row wrap filters">
    <input type="search" placeholder="Name, tag or ID" aria-label="Search runs by name, tag or ID" value=${text} onInput=${(/** @type {any} */ event) => setText(event.target.value)} />
    <select aria-label="Experiment" value=${asked.get('experiment') ?? ''} onChange=${(/** @type {any} */ event) => setQuery({ experiment: event.target.value, after: null })}>
      <option value="">All experiments</option>
      ${experiments.map((one) => html`<option value=${one.id}>${one.name}</option>`)}
    </select>
    <select aria-label="Order" value=${asked.get('sort') ?? 'created_at'} onChange=${(/** @type {any} */ event) => setQuery({ sort: event.target.value === 'created_at' ? null : event.target.value, after: null })}>
      ${SORTS.map(([value, name]) => html`<option value=${value}>${name}</option>`)}
    </select>
    ${['model', 'method', 'tag', 'dataset'].map((name) => asked.get(name) && html`<button type="button" class="btn small" title="Remove this filter" onClick=${() => setQuery({ [name]: null, after: null })}><span class="clip">${name}: ${name === 'dataset' ? format.shortId(asked.get(name) ?? '') : asked.get(name)}</span><${Icon} name="cross" /></button>`)}
    <span class="grow"></span>
    <span class="row wrap" role="group" aria-label="Only runs with these statuses">
      ${STATUSES.filter((status) => counts[status] || statuses.includes(status)).map((status) => html`<button type="button" class="btn quiet small count" aria-pressed=${String(statuses.includes(status))} onClick=${() => flip(status)}>
        <${Chip} status=${status} /><span class="num">${format.integer(counts[status] ?? 0)}</span>
      </button>`)}
    </span>
  </div>`;
}

/** @param {{ runs: any[], picked: string[], onPick: (id: string) => void }} props */
function Table({ runs, picked, onPick }) {
  const now = useNow(10_000);
  return html`<section class="box scroll" tabindex="0" role="region" aria-label="Runs"><table class="table cards">
    <thead><tr>
      <th class="pick"><span class="sr">Select</span></th><th>Run</th><th>Status</th><th>Progress</th><th>Train loss</th><th class="right">Lowest</th>
      <th class="right">Best eval</th><th class="right">Tokens/s</th><th>Time</th><th>Worker</th><th>By</th><th class="right">Created</th>
    </tr></thead>
    <tbody>${runs.map((run) => html`<tr key=${run.id} aria-selected=${String(picked.includes(run.id))}>
      <td class="hide-s"><input type="checkbox" aria-label=${`Select ${run.name}`} checked=${picked.includes(run.id)} onChange=${() => onPick(run.id)} /></td>
      <td class="what"><a class="name" href=${`/runs/${run.id}`}>${run.name}</a><div class="sub clip">${[run.task && run.task !== 'train' ? run.task : run.method, run.base_model].filter(Boolean).join(' · ')}</div></td>
      <td><${Chip} status=${run.status} /></td>
      <td class="hide-s progress"><${Progress} run=${run} /></td>
      <td><${Spark} values=${run.losses ?? []} status=${run.status} /></td>
      <td class="right num hide-s">${format.loss(run.best_loss)}</td>
      <td class="right num hide-s">${format.significant(run.best_eval)}</td>
      <td class="right num hide-s">${format.integer(run.tokens_per_second)}</td>
      <td class="nowrap num"><${Time} run=${run} now=${now} /></td>
      <td class="muted hide-s">${run.worker ?? '–'}</td>
      <td class="muted hide-s">${run.by ?? '–'}</td>
      <td class="right muted num nowrap hide-s" title=${run.created_at}>${format.ago(run.created_at, now)}</td>
    </tr>`)}</tbody>
  </table></section>`;
}

/** @param {{ run: any }} props */
const Progress = ({ run }) => {
  const step = run.step ?? 0;
  if (!run.total_steps) return html`<span class="sub num">${step ? `step ${format.integer(step)}` : '–'}</span>`;
  return html`<div class="row sub num between"><span>${step ? `${format.integer(step)} of ${format.integer(run.total_steps)}` : `${format.integer(run.total_steps)} steps`}</span><span>${format.percent(step, run.total_steps)}</span></div>
    <${Bar} value=${step / run.total_steps} status=${run.status} label=${`Progress of ${run.name}`} />`;
};

/** @param {{ run: any, now: number }} props */
const Time = ({ run, now }) => {
  if (run.status === 'failed') return html`<span class="error-text">${sentence(run.reason ?? 'failed')}</span>`;
  if (run.status === 'pending') {
    if (run.reason && run.reason !== 'queued') return html`<span class="muted">${sentence(run.reason)}</span>`;
    return html`<span class="muted">${run.starts_at ? `starts ${inTime(run.starts_at, now)}` : 'in the queue'}</span>`;
  }
  if (run.finished_at) return html`<span class="muted">${run.started_at ? `took ${format.duration((Date.parse(run.finished_at) - Date.parse(run.started_at)) / 1000)}` : 'never started'}</span>`;
  return run.finishes_at ? html`<b>${format.duration((Date.parse(run.finishes_at) - now) / 1000)}</b> left` : html`<span class="muted">–</span>`;
};

/** @param {string} time @param {number} now */
const inTime = (time, now) => (Date.parse(time) > now ? `in ${format.duration((Date.parse(time) - now) / 1000)}` : 'soon');

/** @param {string} code A code in snake_case, as words. */
const sentence = (code) => {
  const words = code.replaceAll('_', ' ');
  return words.charAt(0).toUpperCase() + words.slice(1);
};
