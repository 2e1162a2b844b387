// Model, data and names of a new run.

import { html, useState } from '../../vendor/preact.js';
import { get } from '../api.js';
import * as format from '../format.js';
import { useResource, useSettled } from '../resource.js';
import { fieldAttributes, RequestField, Words } from './fields.js';

/** @import * as api from '../api_types.js' */

export const DEFAULT_EXPERIMENT = 'exp_00000000000000000000000000';
const MOST_LISTED = 200;

/**
 * @param {{
 *   values: Record<string, any>, config: Record<string, any>, errors: Map<string, string>,
 *   onValue: (name: string, value: unknown) => void, onModel: (text: string) => void,
 * }} props
 */
export function Basics({ values, config, errors, onValue, onModel }) {
  const models = useResource((signal) => get('/v1/models', {}, signal), 'models');
  const trained = useResource(
    (signal) => get('/v1/runs', { status: 'completed', task: 'train', view: 'row', limit: 50 }, signal),
    'trained',
  );
  const [searchText, setSearchText] = useState('');
  const search = useSettled(searchText.trim(), 250);
  const datasets = useResource(
    (signal) => get('/v1/datasets', { limit: MOST_LISTED, search }, signal),
    `datasets ${search}`,
  );
  const listed = datasets.data?.data ?? [];
  // A chosen dataset may be none of those that the search found.
  const missing = [values.dataset_id, values.eval_dataset_id].filter(
    (id) => id && datasets.data && !listed.some((/** @type {api.Dataset} */ dataset) => dataset.id === id),
  );
  const experiments = useResource((signal) => get('/v1/experiments', { limit: 200 }, signal), 'experiments');
  const setFromEvent = (/** @type {string} */ name) => (/** @type {any} */ event) => onValue(name, event.target.value);
  const names = listed.map((/** @type {api.Dataset} */ dataset) => dataset.name);
  // Datasets with the same name are listed with their age and the end of their ID.
  const namesakes = new Set(
    names.filter((/** @type {string} */ name, /** @type {number} */ index) => names.indexOf(name) !== index),
  );
  const options = [
    ...missing.map((id) => html`<option value=${id}>${format.shortId(id)}</option>`),
    ...listed.map(
      (/** @type {api.Dataset} */ dataset) => html`<option value=${dataset.id}>
        ${dataset.name} (${dataset.format}, ${format.counted(dataset.rows, 'row')}
        ${namesakes.has(dataset.name)
          ? `, ${format.ago(dataset.created_at, Date.now())}, ${format.shortId(dataset.id)}`
          : ''})
      </option>`,
    ),
  ];
  const attributes = (/** @type {string} */ path) => fieldAttributes(errors, path);
  const field = { errors, wide: true };
  return html`
    <${RequestField}
      ...${field}
      path="config.base_model"
      title="base_model"
      label="Base model"
      hint="A folder below the models root, a model of the hub, or the ID of a finished run."
    >
      <input
        ...${attributes('config.base_model')}
        type="text"
        list="models"
        required
        placeholder="folder, owner/model or run_…"
        value=${config.base_model ?? ''}
        onInput=${(/** @type {any} */ event) => onModel(event.target.value)}
      />
      <datalist id="models">
        ${(models.data?.data ?? []).map((/** @type {any} */ model) => html`<option value=${model.id}></option>`)}
        ${(trained.data?.data ?? []).map(
          (/** @type {api.RunRow} */ run) => html`<option value=${run.id}>${`output of ${run.name}`}</option>`,
        )}
      </datalist>
    <//>
    <${RequestField} ...${field} path="name" label="Name">
      <input
        ...${attributes('name')}
        type="text"
        maxlength="200"
        placeholder="method and model"
        value=${values.name ?? ''}
        onInput=${setFromEvent('name')}
      />
    <//>
    <${RequestField}
      ...${field}
      path="dataset_id"
      label="Dataset"
      hint=${html`<a href="/datasets">Upload another one</a>`}
    >
      <select
        ...${attributes('dataset_id')}
        required
        value=${values.dataset_id ?? ''}
        onChange=${setFromEvent('dataset_id')}
      >
        <option value="">Choose …</option>
        ${options}
      </select>
      ${(datasets.data?.has_more || searchText) && html`<input
        type="search"
        class="small"
        placeholder="Search datasets"
        aria-label="Search datasets by name or ID"
        value=${searchText}
        onInput=${(/** @type {any} */ event) => setSearchText(event.target.value)}
      />`}
    <//>
    <${RequestField} ...${field} path="eval_dataset_id" label="Eval dataset">
      <select
        ...${attributes('eval_dataset_id')}
        value=${values.eval_dataset_id ?? ''}
        onChange=${setFromEvent('eval_dataset_id')}
      >
        <option value="">none</option>
        ${options}
      </select>
    <//>
    <${RequestField} ...${field} path="experiment_id" label="Experiment">
      <select
        ...${attributes('experiment_id')}
        value=${values.experiment_id ?? ''}
        onChange=${setFromEvent('experiment_id')}
      >
        <option value="">default</option>
        ${(experiments.data?.data ?? [])
          .filter((/** @type {any} */ experiment) => experiment.id !== DEFAULT_EXPERIMENT)
          .map((/** @type {any} */ experiment) => html`<option value=${experiment.id}>${experiment.name}</option>`)}
      </select>
    <//>
    <${RequestField} ...${field} path="tags" label="Tags" hint="Separated by commas.">
      <${Words}
        ...${attributes('tags')}
        words=${values.tags ?? []}
        onWords=${(/** @type {string[]} */ tags) => onValue('tags', tags)}
      />
    <//>
  `;
}
