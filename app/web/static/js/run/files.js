// Files of a run: its output, and the records of each attempt.

import { html, useState } from '../../vendor/preact.js';
import { get } from '../api.js';
import { Icon } from '../components/icon.js';
import { Empty, Loaded } from '../components/states.js';
import * as format from '../format.js';
import { useResource } from '../resource.js';

/** @import * as api from '../api_types.js' */

/** @typedef {{ data: { path: string, bytes: number }[], left_out: number }} FilePage */

/** @param {{ store: import('../run_store.js').RunStore }} props */
export function Files({ store }) {
  const run = store.run.value;
  const path = `/v1/runs/${run.id}/artifacts`;
  const files = useResource((signal) => get(path, {}, signal), run.fine_tuned_model ? `${run.id} ${run.status}` : null);
  return html`<div class="side">
    ${run.fine_tuned_model
      ? html`<${Loaded} resource=${files} what="files">
          ${(/** @type {FilePage} */ page) => html`<${Table}
            title="Output"
            path=${path}
            page=${page}
            archive=${`${path}.tar`}
          />`}
        <//>`
      : html`<section class="box">
          <${Empty} title="No output yet.">
            <p class="muted">
              A run writes its output when it completes. A checkpoint of a stopped or failed run can be exported.
            </p>
          <//>
        </section>`}
    ${(store.attempts.value ?? []).map(
      (attempt) => html`<${Records} key=${attempt.attempt} runId=${run.id} attempt=${attempt} />`,
    )}
  </div>`;
}

/** @param {{ runId: string, attempt: api.Attempt }} props */
function Records({ runId, attempt }) {
  const [isOpen, setOpen] = useState(false);
  const path = `/v1/runs/${runId}/attempts/${attempt.attempt}/artifacts`;
  const files = useResource((signal) => get(path, {}, signal), isOpen ? path : null);
  const outcome = attempt.outcome?.replaceAll('_', ' ') ?? 'running';
  return html`<details class="box group" onToggle=${(/** @type {any} */ event) => setOpen(event.target.open)}>
    <summary>
      Records of attempt ${attempt.attempt}
      <span class="muted">${outcome}: metrics, memory profile, distributions, TensorBoard files</span>
    </summary>
    ${isOpen && html`<${Loaded} resource=${files} what="records">
      ${(/** @type {FilePage} */ page) =>
        page.data.length > 0
          ? html`<${Table} title=${`Files of attempt ${attempt.attempt}`} path=${path} page=${page} />`
          : html`<p class="state muted">The attempt wrote no records.</p>`}
    <//>`}
  </details>`;
}

/** @param {{ title: string, path: string, page: FilePage, archive?: string }} props */
function Table({ title, path, page, archive }) {
  const fileAddress = (/** @type {string} */ name) => `${path}/${name.split('/').map(encodeURIComponent).join('/')}`;
  const size = page.data.reduce((sum, file) => sum + file.bytes, 0);
  return html`<section class="box scroll" tabindex="0" role="region" aria-label=${title}>
    <header>
      <h2>${title}</h2>
      <span class="sub num">${format.counted(page.data.length, 'file')}, ${format.bytes(size)}</span>
      <span class="grow"></span>
      ${archive && html`<a class="btn small" href=${archive} download><${Icon} name="save" />Download all</a>`}
    </header>
    <table class="table">
      <thead>
        <tr><th>File</th><th class="right">Size</th></tr>
      </thead>
      <tbody>
        ${page.data.map(
          (file) => html`<tr key=${file.path}>
            <td class="mono"><a href=${fileAddress(file.path)} download>${file.path}</a></td>
            <td class="right num">${format.bytes(file.bytes)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
    ${page.left_out > 0 && html`<p class="state sub">
      ${format.counted(page.left_out, 'file')} with unprintable names ${page.left_out === 1 ? 'is' : 'are'} not listed.
    </p>`}
  </section>`;
}
