// Datasets: upload, look at the rows, delete.

import { html, useEffect, useState } from '../../vendor/preact.js';
import { get } from '../api.js';
import { Chip } from '../components/controls.js';
import { DeleteDialog } from '../components/dialogs.js';
import { Icon } from '../components/icon.js';
import { PageButtons } from '../components/pages.js';
import { Empty, Loaded } from '../components/states.js';
import { Rows } from '../datasets/rows.js';
import { HubImport, Upload } from '../datasets/upload.js';
import * as format from '../format.js';
import { useNow, useResource, useSettled } from '../resource.js';
import { query, setQuery } from '../router.js';
import { hasScope } from '../session.js';

/** @import * as api from '../api_types.js' */

export const title = 'Datasets';

const PAGE_SIZE = 50;
const MOST_RUNS = 8;

/** @param {{ id?: string }} props */
export default function Datasets({ id }) {
  return id ? html`<${Dataset} id=${id} />` : html`<${List} />`;
}

function List() {
  const params = query.value;
  const after = params.get('after');
  const inAddress = params.get('search') ?? '';
  const [text, setText] = useState(inAddress);
  const search = useSettled(text.trim(), 250);
  useEffect(() => {
    if (inAddress !== text.trim()) setText(inAddress);
  }, [inAddress]);
  const list = useResource(
    (signal) => get('/v1/datasets', { limit: PAGE_SIZE, search: search, after }, signal),
    `datasets ${search} ${after}`,
  );
  const [isImporting, setImporting] = useState(false);
  const now = useNow(60_000);
  return html`
    <div class="head center">
      <h1 class="grow">Datasets</h1>
      <div class="acts">
        ${hasScope('write') && html`<button type="button" class="btn" onClick=${() => setImporting(true)}>
          Import from the hub
        </button>`}
      </div>
    </div>
    ${isImporting && html`<${HubImport} onDone=${list.reload} onClose=${() => setImporting(false)} />`}
    <div class="two">
      <div class="side">
        <div class="row filters">
          <input
            type="search"
            placeholder="Name or ID"
            aria-label="Search datasets by name or ID"
            value=${text}
            onInput=${(/** @type {any} */ event) => {
              setText(event.target.value);
              setQuery({ search: event.target.value.trim() || null, after: null });
            }}
          />
        </div>
        <${Loaded} resource=${list} what="datasets">
          ${(/** @type {api.Page<api.Dataset>} */ page) =>
            page.data.length === 0
              ? html`<section class="box">
                  ${search
                    ? html`<${Empty} title="No dataset matches." />`
                    : html`<${Empty} title="There are no datasets yet.">
                        <p class="muted">
                          Upload a file of chats, prompts with completions, preference pairs or texts.
                        </p>
                      <//>`}
                </section>`
              : html`
                  <section class="box scroll" tabindex="0" role="region" aria-label="Datasets">
                    <table class="table">
                      <thead>
                        <tr>
                          <th>Name</th>
                          <th>Format</th>
                          <th class="right">Rows</th>
                          <th class="right">Size</th>
                          <th class="right">Created</th>
                        </tr>
                      </thead>
                      <tbody>
                        ${page.data.map(
                          (dataset) => html`<tr key=${dataset.id}>
                            <td><a class="name" href=${`/datasets/${dataset.id}`}>${dataset.name}</a></td>
                            <td><span class="tag">${dataset.format}</span></td>
                            <td class="right num">${format.integer(dataset.rows)}</td>
                            <td class="right num nowrap">${format.bytes(dataset.bytes)}</td>
                            <td class="right muted nowrap" title=${dataset.created_at}>
                              ${format.ago(dataset.created_at, now)}
                            </td>
                          </tr>`,
                        )}
                      </tbody>
                    </table>
                  </section>
                  <${PageButtons} after=${after} page=${page} />
                `}
        <//>
      </div>
      <aside class="side">
        ${hasScope('write')
          ? html`<${Upload} onDone=${list.reload} />`
          : html`<p class="box state muted">
              Your key only reads. Sign in with one that has the scope <code>write</code> to upload.
            </p>`}
      </aside>
    </div>
  `;
}

/** @param {{ id: string }} props */
function Dataset({ id }) {
  const resource = useResource((signal) => get(`/v1/datasets/${id}`, {}, signal), id);
  const [isDeleting, setDeleting] = useState(false);
  return html`<${Loaded} resource=${resource} what="the dataset">
    ${(/** @type {any} */ dataset) => html`
      <div class="head">
        <div class="grow">
          <p class="crumb"><a href="/datasets">Datasets</a></p>
          <div class="title"><h1>${dataset.name}</h1><span class="tag">${dataset.format}</span></div>
        </div>
        <div class="acts">
          <a class="btn" href=${`/v1/datasets/${id}/content`} download><${Icon} name="save" />Download</a>
          ${hasScope('write') && html`
            <button type="button" class="btn danger" onClick=${() => setDeleting(true)}>Delete …</button>
            <a class="btn primary" href=${`/new?dataset=${id}`}>New run on it</a>
          `}
        </div>
      </div>
      ${isDeleting && html`<${DeleteDataset} dataset=${dataset} onClose=${() => setDeleting(false)} />`}
      <div class="two">
        <${Rows} dataset=${dataset} />
        <aside class="side">
          <section class="box">
            <header><h2>Facts</h2></header>
            <dl class="kv">
              <dt>Rows</dt>
              <dd>${format.integer(dataset.rows)}</dd>
              <dt>Size</dt>
              <dd>${format.bytes(dataset.bytes)}</dd>
              <dt>Columns</dt>
              <dd class="mono">${dataset.columns.join(', ')}</dd>
              <dt>Created</dt>
              <dd>${format.clock(dataset.created_at)}</dd>
              ${Object.entries(dataset.source ?? {})
                .filter(
                  ([name, value]) => name !== 'sha256' && value != null && typeof value !== 'object' && value !== false,
                )
                .map(([name, value]) => html`<dt>${name.replaceAll('_', ' ')}</dt><dd>${String(value)}</dd>`)}
              ${Object.entries(dataset.token_statistics ?? {})
                .filter(([, value]) => typeof value === 'number' || typeof value === 'string')
                .map(
                  ([name, value]) => html`
                    <dt>${name.replaceAll('_', ' ')}</dt>
                    <dd>${typeof value === 'number' ? format.significant(value) : value}</dd>
                  `,
                )}
              <dt>SHA-256</dt>
              <dd class="mono clip" title=${dataset.sha256}>${dataset.sha256.slice(0, 12)}…</dd>
              ${dataset.source?.sha256 && html`
                <dt>of the upload</dt>
                <dd class="mono clip" title=${dataset.source.sha256}>${dataset.source.sha256.slice(0, 12)}…</dd>
              `}
            </dl>
          </section>
          <${RunsOn} id=${id} />
        </aside>
      </div>
    `}
  <//>`;
}

/** @param {{ id: string }} props */
function RunsOn({ id }) {
  const runs = useResource((signal) => get('/v1/runs', { dataset_id: id, view: 'row', limit: MOST_RUNS }, signal), id);
  const runRows = runs.data?.data ?? [];
  return html`<section class="box" aria-label="Runs on this dataset">
    <header>
      <h2>Runs</h2>
      <span class="grow"></span>
      ${runs.data?.has_more && html`<a class="sub" href=${`/?dataset=${id}&task=all`}>All runs on it</a>`}
    </header>
    <ul class="list">
      ${runRows.map(
        (/** @type {api.RunRow} */ run) => html`<li key=${run.id}>
          <a class="name grow" href=${`/runs/${run.id}`}>${run.name}</a>
          <${Chip} status=${run.status} />
        </li>`,
      )}
      ${runs.data && runRows.length === 0 && html`<li class="muted">No run has used it.</li>`}
    </ul>
  </section>`;
}

/** @param {{ dataset: api.Dataset, onClose: () => void }} props */
const DeleteDataset = ({ dataset, onClose }) => html`<${DeleteDialog}
  what="dataset"
  path=${`/v1/datasets/${dataset.id}`}
  nextPage="/datasets"
  onClose=${onClose}
>
  ${dataset.name} is deleted with its ${format.counted(dataset.rows, 'row')}.
<//>`;
