// Checkpoints of a run: resume from one, pin, export.

import { html, useState } from '../../vendor/preact.js';
import { sendRequest, createIdempotencyKey, post } from '../api.js';
import { FormDialog } from '../components/dialogs.js';
import { Icon } from '../components/icon.js';
import { Empty, Loading } from '../components/states.js';
import * as format from '../format.js';
import { isRewarded } from '../methods.js';
import { useAction } from '../resource.js';
import { useNavigation } from '../router.js';
import { hasScope } from '../session.js';
import { ErrorDialog } from './head.js';
import { ResumeDialog } from './resume.js';

/** @import * as api from '../api_types.js' */

const KIND_LABELS = { periodic: 'periodic', stop: 'at a stop', best: 'best evaluation', final: 'last step' };
/** Usual types of the weights of a GGUF file; the API and `anneal runs export` take all that llama.cpp has. */
const GGUF_TYPES = ['Q4_K_M', 'Q5_K_M', 'Q6_K', 'Q8_0', 'F16', 'BF16'];
const LIVE = new Set(['pending', 'initializing', 'running', 'checkpointing']);

/** @param {{ store: import('../run_store.js').RunStore }} props */
export function Checkpoints({ store }) {
  const run = store.run.value;
  const action = useAction();
  const [resumed, setResumed] = useState(/** @type {api.Checkpoint | null} */ (null));
  const [exported, setExported] = useState(/** @type {api.Checkpoint | null} */ (null));
  const checkpoints = store.checkpoints.value;
  if (!checkpoints) return html`<${Loading} what="checkpoints" />`;
  if (checkpoints.length === 0) {
    return html`<section class="box">
      <${Empty} title="No checkpoint yet.">
        <p class="muted">The run saves one every <code>save_steps</code> steps, at a stop, and at its end.</p>
      <//>
    </section>`;
  }
  const isOver = !LIVE.has(run.status);
  const writesText = run.config.method !== 'reward' && run.task === 'train';
  const base = encodeURIComponent(run.config.base_model);
  const evalName = isRewarded(run.config.method) ? 'eval_reward' : 'eval_loss';
  const togglePin = (/** @type {api.Checkpoint} */ checkpoint) =>
    action.run(async () => {
      await sendRequest('PATCH', `/v1/runs/${run.id}/checkpoints/${checkpoint.id}`, {
        body: { pinned: !checkpoint.pinned },
      });
      await store.readLists();
    });
  return html`
    <section class="box scroll" tabindex="0" role="region" aria-label="Checkpoints">
      <table class="table">
        <thead>
          <tr>
            <th>Step</th>
            <th>Saved</th>
            <th class="right">Epoch</th>
            <th class="right">Train loss</th>
            <th class="right">${evalName === 'eval_loss' ? 'Eval loss' : 'Eval reward'}</th>
            <th class="right">Size</th>
            <th class="right">Saved in</th>
            <th>Copies</th>
            <th><span class="sr">Actions</span></th>
          </tr>
        </thead>
        <tbody>
          ${checkpoints.map(
            (checkpoint) => html`<tr key=${checkpoint.id}>
              <td class="num name nowrap">
                ${format.integer(checkpoint.step)} ${checkpoint.is_best && html`<span class="tag best">
                  best
                </span>`} ${checkpoint.bad_reason && html`<span class="tag warn" title=${checkpoint.bad_reason}>
                  corrupt
                </span>`}
              </td>
              <td class="nowrap">
                ${KIND_LABELS[/** @type {keyof typeof KIND_LABELS} */ (checkpoint.kind)] ?? checkpoint.kind}
                <div class="sub">${format.clock(checkpoint.created_at)}</div>
              </td>
              <td class="right num">${checkpoint.epoch.toFixed(2)}</td>
              <td class="right num">${format.loss(checkpoint.metrics.loss)}</td>
              <td class="right num">${format.loss(checkpoint.metrics[evalName])}</td>
              <td class="right num nowrap">${format.bytes(checkpoint.bytes)}</td>
              <td class="right num nowrap">
                ${checkpoint.save_seconds == null ? '–' : `${checkpoint.save_seconds.toFixed(1)} s`}
              </td>
              <td>
                ${checkpoint.copies.map(
                  (/** @type {string} */ copyPlace) => html`<span class="tag">${copyPlace}</span> `,
                )}
              </td>
              <td class="right nowrap">
                ${hasScope('write') && html`
                  ${writesText && !checkpoint.bad_reason && html`<a
                    class="btn small"
                    href=${`/try?run=${run.id}&model=${checkpoint.id}&model=${base}`}
                  >
                    Try it
                  </a>`}
                  ${' '}
                  <button
                    type="button"
                    class="btn small"
                    disabled=${!isOver || Boolean(checkpoint.bad_reason)}
                    title=${isOver ? undefined : 'Stop the run first'}
                    onClick=${() => setResumed(checkpoint)}
                  >
                    Resume from here …
                  </button>
                  ${' '}
                  <button
                    type="button"
                    class="btn small"
                    disabled=${!isOver || Boolean(checkpoint.bad_reason)}
                    title=${isOver ? undefined : 'Stop the run first'}
                    onClick=${() => setExported(checkpoint)}
                  >
                    Export …
                  </button>
                  ${' '}
                  <button
                    type="button"
                    class="btn quiet icon small"
                    aria-label=${checkpoint.pinned
                      ? `Unpin the checkpoint of step ${checkpoint.step}`
                      : `Pin the checkpoint of step ${checkpoint.step}`}
                    aria-pressed=${String(checkpoint.pinned)}
                    onClick=${() => togglePin(checkpoint)}
                  >
                    <${Icon} name="pin" />
                  </button>
                `}
              </td>
            </tr>`,
          )}
        </tbody>
      </table>
    </section>
    ${action.error && html`<${ErrorDialog} error=${action.error} onClose=${action.clear} />`}
    ${resumed && html`<${ResumeDialog} run=${run} checkpoint=${resumed} onClose=${() => setResumed(null)} />`}
    ${exported && html`<${ExportDialog} run=${run} checkpoint=${exported} onClose=${() => setExported(null)} />`}
  `;
}

/** @param {{ run: api.Run, checkpoint: api.Checkpoint, onClose: () => void }} props */
function ExportDialog({ run, checkpoint, onClose }) {
  const navigate = useNavigation();
  const isAdapter = run.config.method !== 'full' && (run.effective_config ?? run.config).lora_r != null;
  const [output, setOutput] = useState(run.config.output ?? 'adapter');
  const [gguf, setGguf] = useState('');
  const isWhole = !isAdapter || output === 'merged';
  const exportCheckpoint = async () => {
    const path = `/v1/runs/${run.id}/checkpoints/${checkpoint.id}/export`;
    const body = { ...(isAdapter && { output }), ...(isWhole && gguf && { gguf }) };
    const exportRun = await post(path, body, { 'Idempotency-Key': createIdempotencyKey() });
    navigate(`/runs/${exportRun.id}`);
  };
  return html`<${FormDialog}
    title=${`Export the checkpoint of step ${format.integer(checkpoint.step)}`}
    verb="Export"
    onSubmit=${exportCheckpoint}
    onClose=${onClose}
  >
    <p class="muted">
      A short run writes the model; its files are the output of that run, and its ID can be the base model of others.
    </p>
    ${isAdapter && html`<div class="f">
      <label for="form">Form</label>
      <select id="form" value=${output} onChange=${(/** @type {any} */ event) => setOutput(event.target.value)}>
        <option value="adapter">Adapter</option>
        <option value="merged">Merged into the base model</option>
      </select>
    </div>`}
    ${isWhole && html`<div class="f">
      <label for="gguf">GGUF file</label>
      <select id="gguf" value=${gguf} onChange=${(/** @type {any} */ event) => setGguf(event.target.value)}>
        <option value="">${run.config.gguf ? `as the run (${run.config.gguf})` : 'none'}</option>
        ${GGUF_TYPES.map((type) => html`<option value=${type}>${type}</option>`)}
      </select>
      <p class="hint">For Ollama, llama.cpp and LM Studio, with a Modelfile; Q4_K_M is the usual type.</p>
    </div>`}
  <//>`;
}
