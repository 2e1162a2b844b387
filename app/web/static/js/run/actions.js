// Dialogs of the live actions: what each does and costs, before it is requested.

import { html, useState } from '../../vendor/preact.js';
import { createIdempotencyKey, post } from '../api.js';
import { FormDialog } from '../components/dialogs.js';
import * as format from '../format.js';

/** @import * as api from '../api_types.js' */

const TITLES = {
  checkpoint: 'Save a checkpoint now',
  evaluate: 'Evaluate now',
  sample: 'Generate samples',
  set_learning_rate: 'Change the learning rate',
  extend: 'Train longer',
};

/**
 * @param {{ store: import('../run_store.js').RunStore, action: string, onClose: () => void }} props
 */
export function ActionDialog({ store, action: name, onClose }) {
  const run = store.run.value;
  const [values, setValues] = useState(() => initialValues(name, run));
  const setValue = (/** @type {string} */ field) => (/** @type {any} */ event) =>
    setValues({ ...values, [field]: event.target.type === 'checkbox' ? event.target.checked : event.target.value });
  const sendAction = async () => {
    await post(`/v1/runs/${run.id}/actions`, buildBody(name, values), { 'Idempotency-Key': createIdempotencyKey() });
    store.scheduleRenewal(0);
    onClose();
  };
  const title = TITLES[/** @type {keyof typeof TITLES} */ (name)];
  return html`<${FormDialog} title=${title} verb=${title} onSubmit=${sendAction} onClose=${onClose}>
    <p class="muted">${describeCost(name, store)}</p>
    ${name === 'checkpoint' && html`<label class="check">
      <input type="checkbox" checked=${values.pin} onChange=${setValue('pin')} />
      Pin it, so that retention never deletes it
    </label>`}
    ${name === 'sample' && html`
      <div class="f">
        <label for="prompts">Prompts, one per line</label>
        <textarea id="prompts" rows="4" required value=${values.prompts} onInput=${setValue('prompts')}></textarea>
        <p class="hint">At most 8 prompts.</p>
      </div>
      <div class="row">
        <div class="f">
          <label for="tokens">Most new tokens</label>
          <input
            id="tokens"
            type="number"
            min="1"
            max="512"
            value=${values.max_new_tokens}
            onInput=${setValue('max_new_tokens')}
          />
        </div>
        <div class="f">
          <label for="temperature">Temperature</label>
          <input
            id="temperature"
            type="number"
            min="0"
            max="10"
            step="0.1"
            value=${values.temperature}
            onInput=${setValue('temperature')}
          />
        </div>
      </div>
    `}
    ${name === 'set_learning_rate' && html`<div class="f">
      <label for="rate">New peak learning rate</label>
      <input
        id="rate"
        type="text"
        inputmode="decimal"
        required
        value=${values.learning_rate}
        onInput=${setValue('learning_rate')}
      />
      <p class="hint">The peak is ${format.significant(run.config.learning_rate)}. The schedule keeps its shape.</p>
    </div>`}
    ${name === 'extend' && html`<div class="f">
      <label for="steps">New total number of steps</label>
      <input
        id="steps"
        type="number"
        min=${run.current_step + 1}
        required
        value=${values.max_steps}
        onInput=${setValue('max_steps')}
      />
      <p class="hint">Planned are ${format.integer(run.total_steps)} steps.</p>
    </div>`}
  <//>`;
}

/** @param {string} name @param {api.Run} run @returns {Record<string, any>} */
function initialValues(name, run) {
  if (name === 'sample') return { prompts: '', max_new_tokens: 64, temperature: 1 };
  if (name === 'set_learning_rate') return { learning_rate: String((run.config.learning_rate ?? 0) / 2) };
  if (name === 'extend') return { max_steps: String(run.total_steps ? Math.ceil(run.total_steps * 1.5) : '') };
  return { pin: false };
}

/** @param {string} name @param {Record<string, any>} values */
function buildBody(name, values) {
  if (name === 'checkpoint') return { action: name, pin: values.pin };
  if (name === 'sample') {
    const prompts = values.prompts
      .split('\n')
      .map((/** @type {string} */ line) => line.trim())
      .filter(Boolean);
    return {
      action: name,
      prompts,
      max_new_tokens: Number(values.max_new_tokens),
      temperature: Number(values.temperature),
    };
  }
  if (name === 'set_learning_rate') return { action: name, learning_rate: Number(values.learning_rate) };
  if (name === 'extend') return { action: name, max_steps: Number(values.max_steps) };
  return { action: name };
}

/** @param {string} name @param {import('../run_store.js').RunStore} store */
function describeCost(name, store) {
  const saves = (store.checkpoints.value ?? []).slice(0, 5).map((checkpoint) => checkpoint.save_seconds ?? 0);
  if (name === 'checkpoint') {
    return saves.length
      ? `Training pauses for the save; the last ones took up to ${format.duration(Math.max(...saves))}.`
      : 'Training pauses after the current step while it saves.';
  }
  if (name === 'evaluate')
    return 'Training pauses after the current step until the whole evaluation data was evaluated.';
  if (name === 'sample')
    return 'Training pauses after the current step while the model writes. Its random state does not change.';
  if (name === 'set_learning_rate')
    return 'It takes effect at the next step. The change is recorded, and a resumed run keeps it.';
  return 'The learning-rate schedule is stretched to the new length from the next step on.';
}
