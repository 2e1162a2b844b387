// Dialog that resumes a run that has ended, as a new run: how long it trains, and on how many devices.

import { html, useState } from '../../vendor/preact.js';
import { createIdempotencyKey, post } from '../api.js';
import { Dialog } from '../components/controls.js';
import { ErrorText, Prose } from '../components/states.js';
import * as format from '../format.js';
import { useAction } from '../resource.js';
import { useNavigation } from '../router.js';

/** @import * as api from '../api_types.js' */

/** @type {Record<string, string>} Labels of the fields, by their names in the request. */
const LABELS = {
  'config.max_steps': 'Steps in all',
  'config.epochs': 'Epochs in all',
  'config.stop_at_step': 'Stop at step',
  'resources.devices': 'Devices',
};

/**
 * @param {{ run: api.Run, checkpoint: api.Checkpoint | null, onClose: () => void }} props `checkpoint`: null to train
 *   from the first step.
 */
export function ResumeDialog({ run, checkpoint, onClose }) {
  const navigate = useNavigation();
  const action = useAction();
  const [present] = useState(() => readPresentValues(run));
  const [values, setValues] = useState(present);
  const resumeRun = (/** @type {Event} */ event) => {
    event.preventDefault();
    action.run(async () => {
      const source = checkpoint ? { checkpoint_id: checkpoint.id } : { from: 'start' };
      const newRun = await post(
        `/v1/runs/${run.id}/resume`,
        { ...source, ...collectChanges(present, values) },
        { 'Idempotency-Key': createIdempotencyKey() },
      );
      navigate(`/runs/${newRun.id}`);
    });
  };
  const errors = action.error?.errors ?? [];
  const otherErrors = errors.filter((fieldError) => !(fieldError.field in present));
  const startText = checkpoint
    ? `step ${format.integer(checkpoint.step)}, epoch ${checkpoint.epoch.toFixed(2)}`
    : 'the first step';
  return html`<${Dialog} title="Resume the run" onClose=${onClose}>
    <form class="stackform" onSubmit=${resumeRun}>
      <p class="muted">A new run trains on from ${startText}. All other settings stay the same.</p>
      ${Object.entries(values).map(([name, value]) => {
        const id = `resume-${name.replace('.', '-')}`;
        const ownErrors = errors.filter((fieldError) => fieldError.field === name);
        return html`<div class="f" key=${name}>
          <label for=${id}>${LABELS[name]}<code>${name}</code></label>
          <input
            id=${id}
            type="text"
            inputmode="decimal"
            required=${name !== 'config.stop_at_step'}
            value=${value}
            aria-invalid=${ownErrors.length ? 'true' : undefined}
            aria-describedby=${`${id}-errors`}
            onInput=${(/** @type {any} */ event) => setValues({ ...values, [name]: event.target.value })}
          />
          <div id=${`${id}-errors`} role="alert">
            ${ownErrors.map((fieldError) => html`<p class="err"><${Prose} text=${fieldError.message} /></p>`)}
          </div>
        </div>`;
      })}
      <${ErrorText} error=${errors.length === 0 ? action.error : null} />
      ${otherErrors.length > 0 && html`<ul class="checks" role="alert">
        ${otherErrors.map(
          (fieldError) => html`<li class="error-text">
            <code>${fieldError.field}</code> <${Prose} text=${fieldError.message} />
          </li>`,
        )}
      </ul>`}
      <footer>
        <button type="button" class="btn" onClick=${onClose}>Cancel</button>
        <button class="btn primary" disabled=${action.busy}>Resume</button>
      </footer>
    </form>
  <//>`;
}

/**
 * Texts of the fields as they are now. An action may have made the run longer than its configuration says.
 * @param {api.Run} run @returns {Record<string, string>}
 */
function readPresentValues({ config, total_steps: total, resources }) {
  return {
    ...(config.max_steps == null
      ? { 'config.epochs': String(config.epochs) }
      : { 'config.max_steps': String(total ?? config.max_steps) }),
    ...(config.stop_at_step != null && { 'config.stop_at_step': String(config.stop_at_step) }),
    'resources.devices': String(resources.devices),
  };
}

/**
 * Part of the request with the fields that were changed; a text that is no number is left to the service to refuse.
 * @param {Record<string, string>} present @param {Record<string, string>} values
 */
function collectChanges(present, values) {
  /** @type {Record<string, Record<string, unknown>>} */
  const changes = {};
  for (const [name, value] of Object.entries(values)) {
    const [group, field] = name.split('.');
    const text = value.trim();
    if (text !== present[name])
      changes[group] = {
        ...changes[group],
        [field]: text === '' ? null : Number.isNaN(Number(text)) ? text : Number(text),
      };
  }
  return changes;
}
