// Head of a run's page: name, status, what it trains, and what a person can do with it.

import { html, useState } from '../../vendor/preact.js';
import { sendRequest, get, post } from '../api.js';
import { Chip, Copy, Dialog, Menu } from '../components/controls.js';
import { DeleteDialog, FormDialog } from '../components/dialogs.js';
import { Icon } from '../components/icon.js';
import { Prose } from '../components/states.js';
import * as format from '../format.js';
import { useAction, useResource } from '../resource.js';
import { useNavigation } from '../router.js';
import { hasScope } from '../session.js';
import { ActionDialog } from './actions.js';
import { describeResources } from './resources.js';
import { ResumeDialog } from './resume.js';

/** @import * as api from '../api_types.js' */

/** @typedef {import('../run_store.js').RunStore} RunStore */

const LIVE = new Set(['pending', 'initializing', 'running', 'checkpointing']);

/** @param {{ store: RunStore }} props */
export function Head({ store }) {
  const run = store.run.value;
  const experiment = useResource(
    (signal) => get(`/v1/experiments/${run.experiment_id}`, {}, signal),
    run.experiment_id,
  );
  const dataset = useResource((signal) => get(`/v1/datasets/${run.dataset_id}`, {}, signal), run.dataset_id);
  const parent = useResource((signal) => get(`/v1/runs/${run.parent_run_id}`, {}, signal), run.parent_run_id);
  const base = useResource((signal) => get(`/v1/runs/${run.base_run_id}`, {}, signal), run.base_run_id);
  const isOfCheckpoint = run.task !== 'train' && parent.data?.task === 'train';
  const { devices, conditions } = describeResources(run);
  return html`<div class="head">
    <div class="grow">
      <p class="crumb">
        <a href="/">Runs</a> / <a href=${`/?experiment=${run.experiment_id}`}>${experiment.data?.name ?? '…'}</a>
      </p>
      <div class="title">
        <h1>${run.name}</h1>
        <${Chip} status=${run.status} />
        ${run.pinned && html`<span class="tag">pinned</span>`}
        ${run.tags.map(
          (/** @type {string} */ tag) => html`<a class="tag" href=${`/?tag=${encodeURIComponent(tag)}`}>${tag}</a>`,
        )}
      </div>
      <div class="meta">
        <span>
          ${run.task === 'predict'
            ? html`<b>prediction</b> with ${' '}`
            : html`<b>${run.task === 'train' ? run.config.method : run.task}</b> of ${' '}`}
          ${isOfCheckpoint
            ? html`a checkpoint of <a href=${`/runs/${run.parent_run_id}`}>${parent.data.name}</a>`
            : run.task !== 'train' && base.data
              ? html`<a href=${`/runs/${run.base_run_id}`}>${base.data.name}</a>`
              : html`<b>${run.config.base_model}</b>`}
        </span>
        ${run.dataset_id && html`<span>
          on <a href=${`/datasets/${run.dataset_id}`}>${dataset.data?.name ?? format.shortId(run.dataset_id)}</a>
        </span>`}
        <span class="resources"><b>${devices}</b>${conditions.map((condition) => `, ${condition}`)}</span>
        ${run.parent_run_id && !isOfCheckpoint && html`<span>
          resumed
          from <a href=${`/runs/${run.parent_run_id}`}>${parent.data?.name ?? format.shortId(run.parent_run_id)}</a>
        </span>`}
        <span title=${run.created_at}>created ${format.clock(run.created_at)}</span>
        <${Copy} text=${run.id} shown=${format.shortId(run.id)} label="Copy the ID of the run" />
      </div>
    </div>
    <div class="acts">
      ${hasScope('write') && html`
        ${hasAnswers(store) && html`<a class="btn" href=${`/try?run=${run.id}`}>Try it</a>`}
        <${StopOrResume} store=${store} />
        <${ActionsMenu} store=${store} />
      `}
    </div>
  </div>`;
}

/** True for a run whose output or checkpoints write text. @param {RunStore} store */
function hasAnswers({ run: { value: run }, checkpoints }) {
  const isModel = (run.task === 'train' || run.task === 'export') && run.config.method !== 'reward';
  return isModel && (run.fine_tuned_model || checkpoints.value?.some((checkpoint) => !checkpoint.bad_reason));
}

/** @param {{ store: RunStore }} props */
function StopOrResume({ store }) {
  const run = store.run.value;
  const action = useAction();
  const [resumed, setResumed] = useState(/** @type {{ checkpoint: api.Checkpoint | null } | null} */ (null));
  const checkpoints = (store.checkpoints.value ?? []).filter((checkpoint) => !checkpoint.bad_reason);
  const newest = checkpoints[0];
  const best = checkpoints.find((checkpoint) => checkpoint.is_best);
  const stopRun = (/** @type {string} */ mode) =>
    action.run(async () => {
      store.run.value = await post(`/v1/runs/${run.id}/stop`, { mode });
    });
  const failure = action.error && html`<${ErrorDialog} error=${action.error} onClose=${action.clear} />`;
  if (LIVE.has(run.status)) {
    if (run.stop_requested_at && run.stop_mode !== 'epoch_end') {
      return html`
        <button type="button" class="btn" disabled>Stopping …</button>
        ${run.stop_mode !== 'discard' && html`<button
          type="button"
          class="btn danger"
          disabled=${action.busy}
          onClick=${() => stopRun('discard')}
        >
          Stop without saving
        </button>`}
        ${failure}
      `;
    }
    if (run.status === 'pending' || run.task !== 'train')
      return html`
        <button type="button" class="btn" disabled=${action.busy} onClick=${() => stopRun('checkpoint')}>
          <${Icon} name="stop" />
          Stop
        </button>
        ${failure}
      `;
    const lostSteps = run.current_step - (newest?.step ?? 0);
    const slowest = Math.max(...checkpoints.slice(0, 5).map((checkpoint) => checkpoint.save_seconds ?? 0), 0);
    return html`
      <${Menu} button=${html`<${Icon} name="stop" />Stop<${Icon} name="down" />`}>
        <button type="button" onClick=${() => stopRun('checkpoint')}>
          Save a checkpoint and stop
          <small>
            ${slowest ? `Saves took up to ${slowest < 1 ? 'a second' : format.duration(slowest)}.` : 'No step is lost.'}
          </small>
        </button>
        <button type="button" onClick=${() => stopRun('epoch_end')}>
          Stop at the end of the epoch
          <small>Epoch ${(run.current_epoch ?? 0).toFixed(2)} now; it saves a checkpoint there.</small>
        </button>
        ${best && html`<button type="button" onClick=${() => stopRun('best')}>
          Stop and keep the best checkpoint
          <small>
            Step ${format.integer(best.step)};
            the ${format.counted(Math.max(run.current_step - best.step, 0), 'step')} after it are not kept.
          </small>
        </button>`}
        <hr />
        <button type="button" class="danger" onClick=${() => stopRun('discard')}>
          Stop without saving
          <small>Loses the ${format.counted(Math.max(lostSteps, 0), 'step')} since the last checkpoint.</small>
        </button>
      <//>
      ${failure}
    `;
  }
  if (run.task === 'predict' && run.status !== 'completed' && newest)
    return html`<${ResumePrediction} run=${run} checkpoint=${newest} />`;
  if (run.task !== 'train') return failure;
  return html`
    <${Menu}
      kind=${run.status === 'completed' ? '' : 'primary'}
      button=${html`<${Icon} name="play" />Resume<${Icon} name="down" />`}
    >
      <button type="button" disabled=${!newest} onClick=${() => setResumed({ checkpoint: newest })}>
        From the newest checkpoint …
        <small>${newest ? `Step ${format.integer(newest.step)}, as a new run.` : 'There is none.'}</small>
      </button>
      ${best && best !== newest && html`<button type="button" onClick=${() => setResumed({ checkpoint: best })}>
        From the best checkpoint …
        <small>Step ${format.integer(best.step)}, as a new run.</small>
      </button>`}
      <button type="button" onClick=${() => setResumed({ checkpoint: null })}>
        From the start …
        <small>Trains all steps again, as a new run.</small>
      </button>
    <//>
    ${resumed && html`<${ResumeDialog}
      run=${run}
      checkpoint=${resumed.checkpoint}
      onClose=${() => setResumed(null)}
    />`}
    ${failure}
  `;
}

/** @param {{ run: api.Run, checkpoint: api.Checkpoint }} props */
function ResumePrediction({ run, checkpoint }) {
  const action = useAction();
  const navigate = useNavigation();
  const resume = async () => {
    const resumed = await post(`/v1/runs/${run.id}/resume`, { checkpoint_id: checkpoint.id });
    navigate(`/runs/${resumed.id}`);
  };
  return html`
    <button
      type="button"
      class="btn primary"
      disabled=${action.busy}
      title=${`From row ${format.integer(checkpoint.step)}, as a new run.`}
      onClick=${() => action.run(resume)}
    >
      <${Icon} name="play" />
      Resume
    </button>
    ${action.error && html`<${ErrorDialog} error=${action.error} onClose=${action.clear} />`}
  `;
}

/** @param {{ store: RunStore }} props */
function ActionsMenu({ store }) {
  const run = store.run.value;
  const action = useAction();
  const [openDialog, setOpenDialog] = useState(/** @type {string | null} */ (null));
  const updateRun = async (/** @type {object} */ changes) => {
    const updated = await sendRequest('PATCH', `/v1/runs/${run.id}`, { body: changes });
    store.run.value = { ...store.run.value, ...updated };
  };
  const isTraining = run.status === 'running' || run.status === 'checkpointing';
  const isLive = LIVE.has(run.status);
  return html`
    <${Menu} label="More actions" button=${html`Actions<${Icon} name="down" />`}>
      ${isTraining && run.task === 'train' && html`
        <button type="button" onClick=${() => setOpenDialog('checkpoint')}>Save a checkpoint now</button>
        <button type="button" onClick=${() => setOpenDialog('evaluate')}>Evaluate now</button>
        <button type="button" onClick=${() => setOpenDialog('sample')}>Generate samples …</button>
        <button type="button" onClick=${() => setOpenDialog('set_learning_rate')}>Change the learning rate …</button>
        <button type="button" onClick=${() => setOpenDialog('extend')}>Train longer …</button>
        <hr />
      `}
      <a href=${`/new?from=${run.id}`}>New run like this</a>
      <a href=${`/?pick=${run.id}`}>Compare with others …</a>
      <button type="button" onClick=${() => setOpenDialog('rename')}>Rename …</button>
      ${run.status === 'pending' && html`<button type="button" onClick=${() => setOpenDialog('priority')}>
        Change the priority …
        <small>It is ${run.priority}.</small>
      </button>`}
      <button type="button" onClick=${() => action.run(() => updateRun({ pinned: !run.pinned }))}>
        ${run.pinned ? 'Unpin' : 'Pin'}
        <small>${run.pinned ? 'Allow it to be deleted.' : 'Protect it from deletion and retention.'}</small>
      </button>
      ${!isLive && html`
        <hr />
        <button type="button" class="danger" disabled=${run.pinned} onClick=${() => setOpenDialog('delete')}>
          Delete …
        </button>
      `}
    <//>
    ${action.error && html`<${ErrorDialog} error=${action.error} onClose=${action.clear} />`}
    ${openDialog === 'rename' && html`<${RenameDialog}
      run=${run}
      onSave=${updateRun}
      onClose=${() => setOpenDialog(null)}
    />`}
    ${openDialog === 'priority' && html`<${PriorityDialog}
      run=${run}
      onSave=${updateRun}
      onClose=${() => setOpenDialog(null)}
    />`}
    ${openDialog === 'delete' && html`<${DeleteRun} run=${run} onClose=${() => setOpenDialog(null)} />`}
    ${openDialog && !['rename', 'priority', 'delete'].includes(openDialog) && html`<${ActionDialog}
      store=${store}
      action=${openDialog}
      onClose=${() => setOpenDialog(null)}
    />`}
  `;
}

/** @param {{ error: import('../api.js').ApiError, onClose: () => void }} props */
export const ErrorDialog = ({ error, onClose }) => html`<${Dialog} title="The request failed" onClose=${onClose}>
  <p><${Prose} text=${error.message} /></p>
  ${error.errors.length > 1 && html`<ul>
    ${error.errors.map(
      (fieldError) => html`<li><code>${fieldError.field}</code> <${Prose} text=${fieldError.message} /></li>`,
    )}
  </ul>`}
  <footer><button type="button" class="btn primary" onClick=${onClose}>Close</button></footer>
<//>`;

/** @param {{ run: api.Run, onSave: (changes: object) => Promise<void>, onClose: () => void }} props */
function RenameDialog({ run, onSave, onClose }) {
  const [name, setName] = useState(run.name);
  const [tags, setTags] = useState(run.tags.join(', '));
  const save = async () => {
    await onSave({
      name: name.trim(),
      tags: tags
        .split(',')
        .map((/** @type {string} */ tag) => tag.trim())
        .filter(Boolean),
    });
    onClose();
  };
  return html`<${FormDialog} title="Rename the run" onSubmit=${save} onClose=${onClose}>
    <div class="f">
      <label for="run-name">Name</label>
      <input
        id="run-name"
        type="text"
        required
        maxlength="200"
        value=${name}
        onInput=${(/** @type {any} */ event) => setName(event.target.value)}
      />
    </div>
    <div class="f">
      <label for="run-tags">Tags</label>
      <input
        id="run-tags"
        type="text"
        value=${tags}
        onInput=${(/** @type {any} */ event) => setTags(event.target.value)}
      />
      <p class="hint">Separated by commas.</p>
    </div>
  <//>`;
}

/** @param {{ run: api.Run, onSave: (changes: object) => Promise<void>, onClose: () => void }} props */
function PriorityDialog({ run, onSave, onClose }) {
  const [priority, setPriority] = useState(String(run.priority));
  const save = async () => {
    await onSave({ priority: Number(priority) });
    onClose();
  };
  return html`<${FormDialog} title="Change the priority" onSubmit=${save} onClose=${onClose}>
    <div class="f">
      <label for="run-priority">Priority</label>
      <input
        id="run-priority"
        type="number"
        min="-1000"
        max="1000"
        required
        value=${priority}
        onInput=${(/** @type {any} */ event) => setPriority(event.target.value)}
      />
      <p class="hint">Runs with higher priority start first.</p>
    </div>
  <//>`;
}

/** @param {{ run: api.Run, onClose: () => void }} props */
const DeleteRun = ({ run, onClose }) => html`<${DeleteDialog}
  what="run"
  path=${`/v1/runs/${run.id}`}
  nextPage="/"
  onClose=${onClose}
>
  ${run.name} is deleted with its events, checkpoints and output.
<//>`;
