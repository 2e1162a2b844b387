// What can be done with the selected runs: compare, stop, tag and delete them.

import { html, useState } from '../../vendor/preact.js';
import { post } from '../api.js';
import { Dialog } from '../components/controls.js';
import { ErrorText, Prose } from '../components/states.js';
import * as format from '../format.js';
import { useAction } from '../resource.js';
import { hasScope } from '../session.js';

const MOST_COMPARED = 20;
/** Runs that one request may change. */
const MOST_CHANGED = 100;

/** @typedef {{ id: string, outcome: string, detail: string | null }} RunOutcome */

/** @type {[string, string, string][]} Modes of a stop: name, title, explanation. */
const MODES = [
  ['checkpoint', 'Save a checkpoint and stop', 'They can be resumed from there.'],
  ['epoch_end', 'Stop at the end of the epoch', 'They save a checkpoint there.'],
  ['best', 'Stop and keep the best checkpoint', 'The steps after it are not kept.'],
  ['discard', 'Stop without saving', 'The steps since the last checkpoint are lost.'],
];

/** @param {{ picked: string[], onClear: () => void, onChanged: () => void }} props */
export function Bulk({ picked, onClear, onChanged }) {
  const [openDialog, setOpenDialog] = useState(/** @type {'stop' | 'tag' | 'delete' | null} */ (null));
  const isComparable = picked.length >= 2 && picked.length <= MOST_COMPARED;
  const canChange = hasScope('write') && picked.length > 0;
  const tooMany = picked.length > MOST_CHANGED ? `At most ${MOST_CHANGED} at once` : undefined;
  const renderButton = (/** @type {'stop' | 'tag' | 'delete'} */ change, /** @type {string} */ text, kind = '') =>
    html`<button
      type="button"
      class=${`btn ${kind}`}
      disabled=${tooMany !== undefined}
      title=${tooMany}
      onClick=${() => setOpenDialog(change)}
    >
      ${text} …
    </button>`;
  const close = () => setOpenDialog(null);
  return html`
    <div class="acts wrap">
      ${picked.length > 0 && html`
        <span class="sub num selected" role="status">${format.counted(picked.length, 'run')} selected</span>
        <button type="button" class="btn quiet" onClick=${onClear}>Clear</button>
      `}
      ${canChange && html`
        ${renderButton('stop', 'Stop')}
        ${renderButton('tag', 'Tag')}
        ${renderButton('delete', 'Delete', 'danger')}
      `}
      ${isComparable
        ? html`<a class="btn" href=${`/compare?ids=${picked.join(',')}`}>Compare</a>`
        : html`<button type="button" class="btn hide-s" disabled title=${`Select 2 to ${MOST_COMPARED} runs`}>
            Compare
          </button>`}
    </div>
    ${openDialog && html`<${ChangeDialog}
      what=${openDialog}
      ids=${picked}
      onClose=${close}
      onChanged=${onChanged}
      onDeleted=${onClear}
    />`}
  `;
}

/** @type {Record<string, { title: string, verb: string, done: string }>} */
const WORDS = {
  stop: { title: 'Stop', verb: 'Stop', done: 'asked to stop' },
  tag: { title: 'Tag', verb: 'Save', done: 'changed' },
  delete: { title: 'Delete', verb: 'Delete', done: 'deleted' },
};

/**
 * @param {{
 *   what: 'stop' | 'tag' | 'delete', ids: string[], onClose: () => void, onChanged: () => void, onDeleted: () => void,
 * }} props
 */
function ChangeDialog({ what, ids, onClose, onChanged, onDeleted }) {
  const [mode, setMode] = useState('checkpoint');
  const [addedTags, setAddedTags] = useState('');
  const [removedTags, setRemovedTags] = useState('');
  const [result, setResult] = useState(/** @type {RunOutcome[] | null} */ (null));
  const action = useAction();
  const words = WORDS[what];
  const changeRuns = (/** @type {Event} */ event) => {
    event.preventDefault();
    action.run(async () => {
      const fields =
        what === 'stop'
          ? { mode }
          : what === 'tag'
            ? { add: splitTags(addedTags), remove: splitTags(removedTags) }
            : {};
      const { runs } = await post(`/v1/runs/${what}`, { ids, ...fields });
      setResult(runs);
      onChanged();
    });
  };
  const close = () => {
    if (result && what === 'delete') onDeleted();
    onClose();
  };
  const body = result
    ? html`
        <${ChangeResult} runs=${result} done=${words.done} />
        <footer><button type="button" class="btn primary" onClick=${close}>Close</button></footer>
      `
    : html`<form class="stackform" onSubmit=${changeRuns}>
        ${what === 'stop' &&
        MODES.map(
          ([name, title, description]) => html`<label class="choice">
            <input type="radio" name="mode" checked=${mode === name} onChange=${() => setMode(name)} />
            <b>${title}</b>
            <small>${description}</small>
          </label>`,
        )}
        ${what === 'tag' && html`
          <div class="f">
            <label for="tags-add">Add tags</label>
            <input
              id="tags-add"
              type="text"
              value=${addedTags}
              onInput=${(/** @type {any} */ event) => setAddedTags(event.target.value)}
            />
            <p class="hint">Separated by commas.</p>
          </div>
          <div class="f">
            <label for="tags-remove">Remove tags</label>
            <input
              id="tags-remove"
              type="text"
              value=${removedTags}
              onInput=${(/** @type {any} */ event) => setRemovedTags(event.target.value)}
            />
          </div>
        `}
        ${what === 'delete' && html`<p>
          They are deleted with their events, checkpoints and outputs. This cannot be undone.
        </p>`}
        <${ErrorText} error=${action.error} />
        <footer>
          <button type="button" class="btn" onClick=${onClose}>Cancel</button>
          <button class=${`btn ${what === 'delete' ? 'danger' : 'primary'}`} disabled=${action.busy}>
            ${words.verb}
          </button>
        </footer>
      </form>`;
  return html`<${Dialog} title=${`${words.title} ${format.counted(ids.length, 'run')}`} onClose=${close}>${body}<//>`;
}

/** @param {string} text */
const splitTags = (text) =>
  text
    .split(',')
    .map((tag) => tag.trim())
    .filter(Boolean);

/**
 * What became of each run. One that is already as requested, such as one that ended before the stop, is no failure.
 * @param {{ runs: RunOutcome[], done: string }} props
 */
function ChangeResult({ runs, done }) {
  const countOutcome = (/** @type {string} */ outcome) => runs.filter((run) => run.outcome === outcome).length;
  const unchanged = countOutcome('unchanged');
  const refused = runs.filter((run) => run.outcome === 'refused');
  return html`<div role="status" class="checks">
    <p>
      ${format.counted(countOutcome('changed'), 'run')} ${done}
      ${unchanged > 0 ? `, ${format.integer(unchanged)} already so or ended` : ''}.
    </p>
    ${refused.length > 0 && html`
      <p class="error-text">${format.counted(refused.length, 'run')} could not be changed:</p>
      <ul class="checks">
        ${refused.map((run) => html`<li class="sub"><${Prose} text=${run.detail ?? run.id} /></li>`)}
      </ul>
    `}
  </div>`;
}
