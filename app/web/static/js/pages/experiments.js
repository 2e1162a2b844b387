// Experiments: groups of runs, with their counts and best runs.

import { html, useState } from '../../vendor/preact.js';
import { sendRequest, get, post } from '../api.js';
import { Chip, STATUSES } from '../components/controls.js';
import { DeleteDialog, FormDialog } from '../components/dialogs.js';
import { Icon } from '../components/icon.js';
import { PageButtons } from '../components/pages.js';
import { Empty, Loaded } from '../components/states.js';
import * as format from '../format.js';
import { describeGroup, isRewarded } from '../methods.js';
import { useNow, useResource } from '../resource.js';
import { query, useNavigation } from '../router.js';
import { hasScope } from '../session.js';

export const title = 'Experiments';

const PAGE_SIZE = 20;
const MOST_COMPARED = 5;
/** Experiment of runs that name none; it cannot be deleted. */
const DEFAULT_ID = 'exp_00000000000000000000000000';

/** @param {{ id?: string }} props */
export default function Experiments({ id }) {
  return id ? html`<${Experiment} id=${id} />` : html`<${List} />`;
}

function List() {
  const navigate = useNavigation();
  const after = query.value.get('after');
  const list = useResource(
    (signal) => get('/v1/experiments', { limit: PAGE_SIZE, after }, signal),
    `experiments ${after}`,
  );
  const [isNew, setNew] = useState(false);
  const now = useNow(60_000);
  return html`
    <div class="head center">
      <h1 class="grow">Experiments</h1>
      <div class="acts">
        ${hasScope('write') && html`<button type="button" class="btn primary" onClick=${() => setNew(true)}>
          <${Icon} name="plus" />
          New experiment
        </button>`}
      </div>
    </div>
    ${isNew && html`<${EditDialog}
      onClose=${() => setNew(false)}
      onSaved=${(/** @type {any} */ experiment) => navigate(`/experiments/${experiment.id}`)}
    />`}
    <${Loaded} resource=${list} what="experiments">
      ${(/** @type {any} */ page) =>
        page.data.length === 0
          ? html`<section class="box">
              <${Empty} title="There are no experiments yet.">
                <p class="muted">
                  An experiment groups runs that answer one question. A run without one belongs to “default”.
                </p>
              <//>
            </section>`
          : html`
              <section class="box scroll" tabindex="0" role="region" aria-label="Experiments">
                <table class="table">
                  <thead>
                    <tr><th>Experiment</th><th>Runs</th><th>Best run</th><th class="right">Created</th></tr>
                  </thead>
                  <tbody>
                    ${page.data.map(
                      (/** @type {any} */ experiment) => html`<${Row}
                        key=${experiment.id}
                        experiment=${experiment}
                        now=${now}
                      />`,
                    )}
                  </tbody>
                </table>
              </section>
              <${PageButtons} after=${after} page=${page} />
            `}
    <//>
  `;
}

/** @param {{ experiment: any, now: number }} props */
function Row({ experiment, now }) {
  const detail = useResource((signal) => get(`/v1/experiments/${experiment.id}`, {}, signal), experiment.id);
  const best = detail.data?.best_runs[0];
  return html`<tr>
    <td class="what">
      <a class="name" href=${`/experiments/${experiment.id}`}>${experiment.name}</a>
      <div class="sub clip">${experiment.description}</div>
    </td>
    <td>
      ${detail.data
        ? html`<${Counts} experiment=${experiment.id} counts=${detail.data.runs} />`
        : html`<span class="faint">…</span>`}
    </td>
    <td>
      ${best
        ? html`
            <a href=${`/runs/${best.run_id}`}>${best.name}</a> <span class="sub num">
              ${best.metric} ${format.loss(best.value)}
            </span>
          `
        : html`<span class="faint">–</span>`}
    </td>
    <td class="right muted num nowrap" title=${experiment.created_at}>${format.ago(experiment.created_at, now)}</td>
  </tr>`;
}

/** @param {{ experiment: string, counts: Record<string, number> }} props */
const Counts = ({ experiment, counts }) => html`<span class="row wrap">
  ${STATUSES.filter((status) => counts[status]).map(
    (status) => html`<a class="row count" href=${`/?experiment=${experiment}&status=${status}&task=all`}>
      <${Chip} status=${status} />
      <span class="num sub">${format.integer(counts[status])}</span>
    </a>`,
  )}
  ${!STATUSES.some((status) => counts[status]) && html`<span class="faint">none</span>`}
</span>`;

/** @param {{ id: string }} props */
function Experiment({ id }) {
  const resource = useResource((signal) => get(`/v1/experiments/${id}`, {}, signal), id);
  const runs = useResource(
    (signal) => get('/v1/runs', { experiment_id: id, sort: 'best', view: 'row', limit: PAGE_SIZE }, signal),
    `runs ${id}`,
  );
  const [openDialog, setOpenDialog] = useState(/** @type {'edit' | 'delete' | null} */ (null));
  const shownRuns = runs.data?.data ?? [];
  // Only runs of one group are compared with each other.
  const best = shownRuns
    .filter((/** @type {any} */ run) => describeGroup(run) === describeGroup(shownRuns[0]))
    .slice(0, MOST_COMPARED)
    .map((/** @type {any} */ run) => run.id);
  return html`<${Loaded} resource=${resource} what="the experiment">
    ${(/** @type {any} */ experiment) => html`
      <div class="head">
        <div class="grow">
          <p class="crumb"><a href="/experiments">Experiments</a></p>
          <h1>${experiment.name}</h1>
          ${experiment.description && html`<p class="muted pre">${experiment.description}</p>`}
          <div class="meta">
            <${Counts} experiment=${id} counts=${experiment.runs} />
            <span>${format.counted(experiment.checkpoints, 'checkpoint')}</span>
            <span>created ${format.clock(experiment.created_at)}</span>
          </div>
        </div>
        <div class="acts">
          ${best.length >= 2 && html`<a class="btn" href=${`/compare?ids=${best.join(',')}`}>
            Compare the best ${best.length}
          </a>`}
          ${hasScope('write') && html`
            <button type="button" class="btn" onClick=${() => setOpenDialog('edit')}>Edit …</button>
            ${id !== DEFAULT_ID && html`<button
              type="button"
              class="btn danger"
              onClick=${() => setOpenDialog('delete')}
            >
              Delete …
            </button>`}
          `}
        </div>
      </div>
      ${openDialog === 'edit' && html`<${EditDialog}
        experiment=${experiment}
        onClose=${() => setOpenDialog(null)}
        onSaved=${() => {
          setOpenDialog(null);
          resource.reload();
        }}
      />`}
      ${openDialog === 'delete' && html`<${DeleteExperiment}
        experiment=${experiment}
        onClose=${() => setOpenDialog(null)}
      />`}
      <${Loaded} resource=${runs} what="runs">
        ${() =>
          shownRuns.length === 0
            ? html`<section class="box">
                <${Empty} title="This experiment has no run yet.">
                  ${hasScope('write') && html`<p>
                    <a class="btn primary" href=${`/new?experiment=${id}`}>New run</a>
                  </p>`}
                <//>
              </section>`
            : html`<section class="box scroll" tabindex="0" role="region" aria-label="Best runs of each method">
                <header>
                  <h2>Best runs of each method</h2>
                  <span class="grow"></span>
                  <a class="sub" href=${`/?experiment=${id}&task=all`}>All</a>
                </header>
                <table class="table">
                  <thead>
                    <tr>
                      <th>Run</th>
                      <th>Status</th>
                      <th class="right">Steps</th>
                      <th class="right">Lowest train loss</th>
                      <th class="right">Best eval</th>
                    </tr>
                  </thead>
                  <tbody>
                    ${shownRuns.map(
                      (/** @type {any} */ run, /** @type {number} */ index) => html`
                        ${describeGroup(run) !== (index > 0 && describeGroup(shownRuns[index - 1])) && html`<tr
                          class="group"
                          key=${describeGroup(run)}
                        >
                          <th scope="rowgroup" colspan="5">${describeGroup(run)}</th>
                        </tr>`}
                        <tr key=${run.id}>
                          <td>
                            <a class="name" href=${`/runs/${run.id}`}>${run.name}</a>
                            <div class="sub">${run.method} · ${run.base_model}</div>
                          </td>
                          <td><${Chip} status=${run.status} /></td>
                          <td class="right num">${format.integer(run.step ?? 0)}</td>
                          <td class="right num">${isRewarded(run.method) ? '–' : format.loss(run.best_loss)}</td>
                          <td class="right num">${format.loss(run.best_eval)}</td>
                        </tr>
                      `,
                    )}
                  </tbody>
                </table>
              </section>`}
      <//>
    `}
  <//>`;
}

/** @param {{ experiment?: any, onClose: () => void, onSaved: (experiment: any) => void }} props */
function EditDialog({ experiment, onClose, onSaved }) {
  const [name, setName] = useState(experiment?.name ?? '');
  const [description, setDescription] = useState(experiment?.description ?? '');
  const saveExperiment = async () => {
    const body = { name: name.trim(), description };
    onSaved(
      experiment
        ? await sendRequest('PATCH', `/v1/experiments/${experiment.id}`, { body })
        : await post('/v1/experiments', body),
    );
  };
  return html`<${FormDialog}
    title=${experiment ? 'Edit the experiment' : 'New experiment'}
    onSubmit=${saveExperiment}
    onClose=${onClose}
  >
    <div class="f">
      <label for="experiment-name">Name</label>
      <input
        id="experiment-name"
        type="text"
        required
        maxlength="200"
        value=${name}
        onInput=${(/** @type {any} */ event) => setName(event.target.value)}
      />
    </div>
    <div class="f">
      <label for="experiment-text">Description</label>
      <textarea
        id="experiment-text"
        rows="3"
        maxlength="10000"
        value=${description}
        onInput=${(/** @type {any} */ event) => setDescription(event.target.value)}
      ></textarea>
      <p class="hint">Such as the question that its runs answer.</p>
    </div>
  <//>`;
}

/** @param {{ experiment: any, onClose: () => void }} props */
function DeleteExperiment({ experiment, onClose }) {
  const count = Object.values(experiment.runs).reduce(
    (/** @type {number} */ sum, runs) => sum + /** @type {number} */ (runs),
    0,
  );
  return html`<${DeleteDialog}
    what="experiment"
    path=${`/v1/experiments/${experiment.id}`}
    query=${{ cascade: count > 0 }}
    nextPage="/experiments"
    onClose=${onClose}
  >
    ${experiment.name} is deleted with
    its ${format.counted(count, 'run')}, ${format.counted(experiment.checkpoints, 'checkpoint')} and ${format.counted(
      experiment.models,
      'model',
    )}.
  <//>`;
}
