// Upload of files, one after the other, with progress; and import from the hub.

import { effect, html, signal, useEffect, useRef, useState } from '../../vendor/preact.js';
import { ApiError, post, uploadForm } from '../api.js';
import { Bar } from '../components/controls.js';
import { FormDialog } from '../components/dialogs.js';
import { ErrorText, Prose } from '../components/states.js';
import * as format from '../format.js';
import { useNavigation } from '../router.js';
import { session } from '../session.js';

/** @import * as api from '../api_types.js' */

/**
 * @typedef {object} Transfer
 * @property {number} number
 * @property {File} file
 * @property {'waiting' | 'sending' | 'checking' | 'done' | 'failed' | 'cancelled'} state
 * @property {number} sent Bytes.
 * @property {number} began Milliseconds since 1970.
 * @property {ApiError | null} error
 * @property {api.Dataset | null} dataset
 * @property {AbortController} aborted
 */

/** Uploads of the signed-in person. They go on while other pages are shown. */
const transfers = signal(/** @type {Transfer[]} */ ([]));
let lastNumber = 0;
/** Ends with the last upload: they are sent one after the other. */
let queue = Promise.resolve();

effect(() => {
  if (session.value !== null) return;
  for (const { aborted } of transfers.peek()) aborted.abort();
  transfers.value = [];
});

/** @param {number} number @param {Partial<Transfer>} values */
function updateTransfer(number, values) {
  transfers.value = transfers.value.map((transfer) =>
    transfer.number === number ? { ...transfer, ...values } : transfer,
  );
}

/** @param {Transfer} transfer */
async function sendFile({ number, file, aborted }) {
  if (aborted.signal.aborted) return;
  updateTransfer(number, { state: 'sending', began: Date.now() });
  const form = new FormData();
  form.append('name', file.name);
  form.append('file', file);
  try {
    const dataset = await uploadForm(
      '/v1/datasets',
      form,
      (sent, total) => updateTransfer(number, { sent, state: sent < total ? 'sending' : 'checking' }),
      aborted.signal,
    );
    updateTransfer(number, { state: 'done', dataset });
  } catch (error) {
    if (error instanceof ApiError) updateTransfer(number, { state: 'failed', error });
    else updateTransfer(number, { state: 'cancelled' });
  }
}

/** @param {FileList | null | undefined} files */
function enqueueFiles(files) {
  const added = [...(files ?? [])].map((file) => ({
    number: (lastNumber += 1),
    file,
    state: /** @type {'waiting'} */ ('waiting'),
    sent: 0,
    began: 0,
    error: null,
    dataset: null,
    aborted: new AbortController(),
  }));
  transfers.value = [...added, ...transfers.value];
  for (const transfer of added) queue = queue.then(() => sendFile(transfer));
}

/** @param {{ onDone: () => void }} props `onDone`: called when a dataset was stored. */
export function Upload({ onDone }) {
  const [isOver, setOver] = useState(false);
  const input = useRef(/** @type {HTMLInputElement | null} */ (null));
  const storedCount = transfers.value.filter((transfer) => transfer.state === 'done').length;
  const listedCount = useRef(storedCount);
  useEffect(() => {
    if (storedCount > listedCount.current) onDone();
    listedCount.current = storedCount;
  }, [storedCount]);
  return html`
    <div
      class=${isOver ? 'drop over' : 'drop'}
      onDragOver=${(/** @type {DragEvent} */ event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave=${() => setOver(false)}
      onDrop=${(/** @type {DragEvent} */ event) => {
        event.preventDefault();
        setOver(false);
        enqueueFiles(event.dataTransfer?.files);
      }}
    >
      <button type="button" class="btn primary" onClick=${() => input.current?.click()}>Upload files</button>
      <input
        ref=${input}
        type="file"
        multiple
        hidden
        aria-label="Files to upload"
        accept=".jsonl,.json,.csv,.tsv,.parquet,.gz"
        onChange=${(/** @type {any} */ event) => {
          enqueueFiles(event.target.files);
          event.target.value = '';
        }}
      />
      <p class="sub">or drop them here: JSONL, JSON, CSV, TSV or Parquet, also with gzip</p>
    </div>
    ${transfers.value.map(
      (transfer) => html`<${TransferBox}
        key=${transfer.number}
        transfer=${transfer}
        onCancel=${() => {
          transfer.aborted.abort();
          updateTransfer(transfer.number, { state: 'cancelled' });
        }}
        onClose=${() => {
          transfers.value = transfers.value.filter((other) => other !== transfer);
        }}
      />`,
    )}
  `;
}

/** @param {{ transfer: Transfer, onCancel: () => void, onClose: () => void }} props */
function TransferBox({ transfer, onCancel, onClose }) {
  const { file, state, sent, error, dataset } = transfer;
  const isActive = state === 'waiting' || state === 'sending' || state === 'checking';
  return html`<section class="box" aria-label=${`Upload of ${file.name}`}>
    <header>
      <h2 class="clip">${file.name}</h2>
      ${state === 'failed' && html`<span class="tag warn">rejected, nothing was stored</span>`}
      ${state === 'done' && html`<span class="tag best">stored</span>`}
      <span class="grow"></span>
      <button type="button" class="btn quiet small" onClick=${isActive ? onCancel : onClose}>
        ${isActive ? 'Cancel' : 'Close'}
      </button>
    </header>
    ${(state === 'sending' || state === 'checking') && html`<div class="inside">
      <${Bar} value=${sent / Math.max(file.size, 1)} label=${`Upload of ${file.name}`} />
      <p class="sub num" role="status">${format.transfer(sent, file.size, (Date.now() - transfer.began) / 1000)}</p>
    </div>`}
    ${state === 'waiting' && html`<p class="inside sub">Waits for the file before it.</p>`}
    ${state === 'cancelled' && html`<p class="inside sub">Cancelled. Nothing was stored.</p>`}
    ${state === 'done' && dataset && html`<p class="inside">
      <a href=${`/datasets/${dataset.id}`}>${format.counted(dataset.rows, 'row')} of format ${dataset.format}</a>
    </p>`}
    ${error && html`
      <div class="inside"><${ErrorText} error=${error} /></div>
      ${error.errors.length > 0 && html`<ul class="list">
        ${error.errors.map(
          (fieldError) => html`<li>
            <span class="sub num nowrap">${fieldError.field}</span>
            <span class="grow"><${Prose} text=${fieldError.message} /></span>
          </li>`,
        )}
      </ul>`}
    `}
  </section>`;
}

/** @param {{ onDone: () => void, onClose: () => void }} props `onDone`: called after an import, closed or not. */
export function HubImport({ onDone, onClose }) {
  const navigate = useNavigation();
  const [values, setValues] = useState({ hub: '', split: 'train', subset: '' });
  const setValue = (/** @type {string} */ name) => (/** @type {any} */ event) =>
    setValues({ ...values, [name]: event.target.value });
  const importDataset = async () => {
    const dataset = await post('/v1/datasets', {
      hub: values.hub.trim(),
      split: values.split.trim() || 'train',
      ...(values.subset.trim() ? { subset: values.subset.trim() } : {}),
    });
    onDone();
    navigate(`/datasets/${dataset.id}`);
  };
  return html`<${FormDialog}
    title="Import from the Hugging Face Hub"
    verb="Import"
    busyText="The service downloads and checks the dataset …"
    onSubmit=${importDataset}
    onClose=${onClose}
  >
    <div class="f">
      <label for="hub">Dataset</label>
      <input id="hub" type="text" required placeholder="owner/name" value=${values.hub} onInput=${setValue('hub')} />
    </div>
    <div class="row">
      <div class="f">
        <label for="split">Split</label>
        <input id="split" type="text" value=${values.split} onInput=${setValue('split')} />
      </div>
      <div class="f">
        <label for="subset">Subset</label>
        <input id="subset" type="text" value=${values.subset} onInput=${setValue('subset')} />
      </div>
    </div>
  <//>`;
}
