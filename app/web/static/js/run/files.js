// Files of a run's output.

import { html } from '../../vendor/preact.js';
import { get } from '../api.js';
import { Icon } from '../components/icon.js';
import { Empty, Loaded } from '../components/states.js';
import * as format from '../format.js';
import { useResource } from '../resource.js';

/** @param {{ store: import('../run_store.js').RunStore }} props */
export function Files({ store }) {
  const run = store.run.value;
  const files = useResource((signal) => get(`/v1/runs/${run.id}/artifacts`, {}, signal), run.fine_tuned_model ? `${run.id} ${run.status}` : null);
  const href = (/** @type {string} */ path) => `/v1/runs/${run.id}/artifacts/${path.split('/').map(encodeURIComponent).join('/')}`;
  if (!run.fine_tuned_model) {
    return html`<section class="box"><${Empty} title="No output yet."><p class="muted">A run writes its output when it completes. A checkpoint of a stopped or failed run can be exported.</p><//></section>`;
  }
  return html`<${Loaded} resource=${files} what="files">${(/** @type {any} */ page) => html`<section class="box scroll" tabindex="0" role="region" aria-label="Files">
        <header><h2>Output</h2><span class="sub num">${format.counted(page.data.length, 'file')}, ${format.bytes(page.data.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.bytes, 0))}</span><span class="grow"></span>
          <a class="btn small" href=${`/v1/runs/${run.id}/artifacts.tar`} download><${Icon} name="save" />Download all</a></header>
        <table class="table"><thead><tr><th>File</th><th class="right">Size</th></tr></thead>
          <tbody>${page.data.map((/** @type {any} */ one) => html`<tr key=${one.path}><td class="mono"><a href=${href(one.path)} download>${one.path}</a></td><td class="right num">${format.bytes(one.bytes)}</td></tr>`)}</tbody></table>
        ${page.left_out > 0 && html`<p class="state sub">${format.counted(page.left_out, 'file')} with unprintable names ${page.left_out === 1 ? 'is' : 'are'} not listed.</p>`}
      </section>`}<//>`;
}
