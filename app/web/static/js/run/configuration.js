// Configuration of a run beside the defaults and the run that it resumes, with the reason of each replacement, and the
// facts that its trainer reported.

import { html, useState } from '../../vendor/preact.js';
import { get } from '../api.js';
import { Copy } from '../components/controls.js';
import { Prose } from '../components/states.js';
import * as format from '../format.js';
import { readFieldsOfConfig, isDefault, areEqual } from '../new_run_form.js';
import { useResource } from '../resource.js';
import { collectFacts, describePlans } from './facts.js';

/** @import * as api from '../api_types.js' */

/**
 * @typedef {{
 *   field: string, used: unknown, parent: unknown, fallback: unknown, isDefault: boolean, reason: string,
 * }} Row
 */

/** @param {{ store: import('../run_store.js').RunStore }} props */
export function Configuration({ store }) {
  const run = store.run.value;
  const [isShort, setShort] = useState(true);
  const parent = useResource((signal) => get(`/v1/runs/${run.parent_run_id}`, {}, signal), run.parent_run_id);
  const schema = useResource((signal) => get('/v1/config-schema', {}, signal), 'config-schema');
  const fields = schema.data ? readFieldsOfConfig(schema.data, run.config) : new Map();
  const rows = buildRows(run, parent.data, fields, store.readReplacements());
  const shownRows = rows.filter(
    (row) => !isShort || row.reason || !row.isDefault || (parent.data && !areEqual(row.used, row.parent)),
  );
  return html`
    <section class="box scroll" tabindex="0" role="region" aria-label="Configuration">
      <header>
        <h2>Configuration</h2>
        <label class="check">
          <input
            type="checkbox"
            checked=${isShort}
            onChange=${(/** @type {any} */ event) => setShort(event.target.checked)}
          />
          Only what differs
        </label>
        <span class="grow"></span>
        <${Copy} text=${JSON.stringify(run.config, null, 2)} shown="Copy as JSON" label="Copy the configuration" />
        <a class="btn small" href=${`/new?from=${run.id}`}>New run like this</a>
      </header>
      <table class="table">
        <thead>
          <tr>
            <th>Field</th>
            <th>Used</th>
            <th>Default</th>
            ${parent.data && html`<th>In ${parent.data.name}, resumed from</th>`}
            <th>Reason</th>
          </tr>
        </thead>
        <tbody>
          ${shownRows.map(
            (row) => html`<tr key=${row.field}>
              <td class="mono nowrap">${row.field}</td>
              <td class="mono"><b>${format.configValue(row.used)}</b></td>
              <td class="mono muted">
                ${row.isDefault ? html`<span class="faint">same</span>` : format.configValue(row.fallback)}
              </td>
              ${parent.data && html`<td class="mono muted">
                ${areEqual(row.used, row.parent)
                  ? html`<span class="faint">same</span>`
                  : format.configValue(row.parent)}
              </td>`}
              <td class="muted"><${Prose} text=${row.reason} /></td>
            </tr>`,
          )}
        </tbody>
      </table>
      ${shownRows.length === 0 && html`<p class="state muted">Every field has its default.</p>`}
    </section>
    <${Facts} run=${run} />
  `;
}

/** @param {{ run: api.Run }} props */
function Facts({ run }) {
  const facts = collectFacts(run);
  const plans = describePlans(run.facts?.step_plan);
  if (facts.length === 0) return null;
  return html`
    <section class="box scroll below" tabindex="0" role="region" aria-label="Run facts">
      <header>
        <h2>Run facts</h2>
        <span class="grow"></span>
        <${Copy} text=${JSON.stringify(run.facts, null, 2)} shown="Copy as JSON" label="Copy the run facts" />
      </header>
      <table class="table">
        <tbody>
          ${facts.map(([name, value]) => html`<tr key=${name}><th scope="row">${name}</th><td>${value}</td></tr>`)}
        </tbody>
      </table>
    </section>
    ${plans.length > 1 && html`<section
      class="box scroll below"
      tabindex="0"
      role="region"
      aria-label="Plans of a step"
    >
      <header><h2>Planned step and its alternatives</h2></header>
      <table class="table">
        <thead>
          <tr>
            <th>Step</th>
            <th class="right">Layers recomputed</th>
            <th class="right">Peak, GiB</th>
            <th class="right">Seconds</th>
            <th></th>
          </tr>
        </thead>
        <tbody>
          ${plans.map(
            (plan) => html`<tr key=${plan.step}>
              <td class="nowrap">${plan.step}</td>
              <td class="right num">${plan.recomputed}</td>
              <td class="right num">${plan.peak}</td>
              <td class="right num">${plan.seconds}</td>
              <td class="muted">${plan.source}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </section>`}
  `;
}

/**
 * @param {api.Run} run @param {api.Run | undefined} parent
 * @param {Map<string, import('../new_run_form.js').FormField>} fields
 * @param {{ field: string, reason: string }[]} replaced
 * @returns {Row[]}
 */
function buildRows(run, parent, fields, replaced) {
  const effective = { ...run.config, ...run.effective_config };
  const reasons = new Map(replaced.map((replacement) => [replacement.field, replacement.reason]));
  const before = { ...parent?.config, ...parent?.effective_config };
  return Object.keys(effective)
    .sort()
    .map((field) => ({
      field,
      used: effective[field],
      parent: before[field],
      fallback: fields.get(field)?.fallback,
      isDefault: isDefault(fields.get(field), effective[field]),
      reason: reasons.get(field) ?? '',
    }));
}
