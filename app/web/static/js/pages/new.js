// New run: a form from the schema of the configuration, validated and estimated as one types.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from '../../vendor/preact.js';
import { get, createIdempotencyKey, post } from '../api.js';
import { Choice, Copy } from '../components/controls.js';
import { ErrorText, Failure, Loading, Prose } from '../components/states.js';
import * as format from '../format.js';
import { ADAPTERS, readChoice, OBJECTIVES, applyChoice } from '../methods.js';
import {
  formatCurl,
  readFieldsOfConfig,
  readGroups,
  isDefault,
  NONE,
  buildRequest,
  areEqual,
  formatValue,
  parseValue,
  formatYaml,
} from '../new_run_form.js';
import { useAction, useResource, useSettled } from '../resource.js';
import { navigate, query } from '../router.js';
import { hasScope } from '../session.js';

/** @import * as api from '../api_types.js' */
/** @import { FormField } from '../new_run_form.js' */

export const title = 'New run';

/** Drafts are kept by the address, for a reload of the page. */
const DRAFT_KEY = 'anneal.new-run ';
const DEFAULT_RESTARTS = 3;
const DEFAULT_EXPERIMENT = 'exp_00000000000000000000000000';
const SETTLE_MS = 400;
const MOST_LISTED = 200;
/** Fields that are always in sight, for all methods and for those with an adapter. */
const MAIN_FIELDS = [
  'learning_rate',
  'epochs',
  'max_steps',
  'batch_size',
  'gradient_accumulation_steps',
  'max_seq_length',
  'packing',
  'eval_split',
  'eval_steps',
  'save_steps',
];
const ADAPTER_FIELDS = ['lora_r', 'lora_alpha'];
/** Fields with controls of their own. */
const WITH_OWN_CONTROL = new Set(['base_model', 'method']);
/**
 * @typedef {object} Draft
 * @property {Record<string, any>} values Fields of the request beside the configuration.
 * @property {Record<string, unknown>} config Fields of the configuration that were set.
 * @property {Record<string, string>} texts Texts that are not valid values, by field.
 */

/** @returns {Draft} */
const createEmptyDraft = () => ({ values: {}, config: {}, texts: {} });

export default function New() {
  const params = query.value;
  const schema = useResource((signal) => get('/v1/config-schema', {}, signal), 'config-schema');
  const start = useResource((signal) => readStartingPoint(params, signal), params.toString());
  if (!hasScope('write')) {
    return html`
      <h1>New run</h1>
      <p class="box state">
        Your key only reads. Sign in with one that has the scope <code>write</code> to start
        runs; <code>anneal keys create --scope write</code> on the server creates one.
      </p>
    `;
  }
  const error = schema.error ?? start.error;
  if (!schema.data || !start.data)
    return error
      ? html`<${Failure}
          error=${error}
          onRetry=${() => {
            schema.reload();
            start.reload();
          }}
        />`
      : html`<${Loading} what="the form" />`;
  return html`<${Form}
    key=${params.toString()}
    schema=${schema.data}
    start=${start.data}
    place=${DRAFT_KEY + params.toString()}
  />`;
}

/**
 * Values that the address asks for: those of a run, or of the correction of a failed one.
 * @param {URLSearchParams} params @param {AbortSignal} signal
 * @returns {Promise<Draft>}
 */
async function readStartingPoint(params, signal) {
  const fix = params.get('fix');
  const from = params.get('from');
  if (fix) {
    const report = await get(`/v1/runs/${encodeURIComponent(fix)}/postmortem`, {}, signal);
    const run = await get(`/v1/runs/${encodeURIComponent(fix)}`, {}, signal);
    return { ...createDraft(run), config: report.correction?.config ?? run.config };
  }
  if (from) return createDraft(await get(`/v1/runs/${encodeURIComponent(from)}`, {}, signal));
  const named = { dataset_id: params.get('dataset'), experiment_id: params.get('experiment') };
  return { ...createEmptyDraft(), values: Object.fromEntries(Object.entries(named).filter(([, value]) => value)) };
}

/** @param {api.Run} run @returns {Draft} */
function createDraft(run) {
  const values = {
    name: run.name,
    dataset_id: run.dataset_id,
    eval_dataset_id: run.eval_dataset_id,
    tags: run.tags,
    experiment_id: run.experiment_id === DEFAULT_EXPERIMENT ? null : run.experiment_id,
    backend: run.backend === 'celery' ? null : run.backend,
    priority: run.priority || null,
    max_restarts: run.max_restarts === DEFAULT_RESTARTS ? null : run.max_restarts,
    resources:
      run.resources.kind ||
      run.resources.gpu ||
      run.resources.memory_mb ||
      run.resources.labels.length ||
      run.resources.devices > 1
        ? run.resources
        : null,
    extra_eval_datasets: Object.keys(run.extra_eval_datasets).length ? run.extra_eval_datasets : null,
  };
  return { values, config: { ...run.config }, texts: {} };
}

/** @param {string} place @returns {Draft | null} */
function readStoredDraft(place) {
  try {
    return JSON.parse(sessionStorage.getItem(place) ?? 'null');
  } catch {
    return null;
  }
}

/** @param {{ schema: any, start: Draft, place: string }} props */
function Form({ schema, start, place }) {
  const groups = useMemo(() => readGroups(schema), [schema]);
  const [draft, setDraft] = useState(() => {
    const stored = readStoredDraft(place);
    if (stored) return stored;
    // A run has a value for every field; those that differ from the defaults of its method were chosen.
    const fieldsOfMethod = readFieldsOfConfig(schema, start.config);
    const changed = Object.entries(start.config).filter(
      ([name, value]) => fieldsOfMethod.has(name) && !isDefault(fieldsOfMethod.get(name), value),
    );
    return { ...start, config: Object.fromEntries(changed) };
  });
  const { values, config, texts } = draft;
  const fields = useMemo(() => readFieldsOfConfig(schema, config), [schema, config.method, config.lora_r]);
  // Before the next task, which may be that of a reload.
  useLayoutEffect(() => sessionStorage.setItem(place, JSON.stringify(draft)), [draft, place]);
  const setValue = (/** @type {string} */ name, /** @type {unknown} */ value) =>
    setDraft({ ...draft, values: { ...values, [name]: value } });
  const setField = (/** @type {string} */ name, /** @type {string} */ text) => {
    const field = /** @type {FormField} */ (fields.get(name));
    const { [name]: _text, ...others } = texts;
    const { [name]: _value, ...otherConfig } = config;
    try {
      const value = parseValue(field, text);
      // A value that equals the default stays: it keeps its meaning when the method, and so the default, changes.
      setDraft({ ...draft, texts: others, config: value === undefined ? otherConfig : { ...config, [name]: value } });
    } catch {
      setDraft({ ...draft, texts: { ...texts, [name]: text }, config: otherConfig });
    }
  };
  const body = buildRequest(values, config);
  const isChecked = Boolean(values.dataset_id && config.base_model);
  const isReady = isChecked && Object.keys(texts).length === 0;
  const request = JSON.stringify(body);
  const settled = useSettled(isChecked ? request : '', SETTLE_MS);
  const checked = useResource(
    () => post('/v1/runs/validate', JSON.parse(settled)),
    settled ? `validate ${settled}` : null,
  );
  const estimate = useResource(
    () => post('/v1/runs/estimate', JSON.parse(settled)),
    settled && isReady && checked.data?.valid ? `estimate ${settled}` : null,
  );
  const action = useAction();
  const sent = useRef({ text: '', key: '' });
  const startRun = (/** @type {Event} */ event) => {
    event.preventDefault();
    action.run(async () => {
      // The same key for the same request: a repeated click, or one after a broken connection, starts no second run.
      if (sent.current.text !== request) sent.current = { text: request, key: createIdempotencyKey() };
      const run = await post('/v1/runs', body, { 'Idempotency-Key': sent.current.key });
      sessionStorage.removeItem(place);
      navigate(`/runs/${run.id}`);
    });
  };
  const errors = settled ? (readCheck(checked)?.errors ?? []) : [];
  // Errors of what the form held before prevent no start: a click would be lost if they arrived during it.
  const isRefused = checked.isCurrent && settled === request && errors.length > 0;
  // Texts that are no values of their fields, which the service checks without them.
  const unreadable = Object.entries(texts).map(([name, text]) => ({
    field: `config.${name}`,
    message: describeProblem(/** @type {any} */ (fields.get(name)), text),
  }));
  const shownErrors = new Map([...errors, ...unreadable].map(({ field, message }) => [field, message]));
  const method = String(config.method ?? schema.properties.method.default);
  const methods = /** @type {FormField} */ (fields.get('method')).choices;
  const choice = readChoice(config, method);
  const objectives = OBJECTIVES.filter(([name]) => methods.includes(name));
  const isAdapter = config.lora_r !== null && choice.adapter !== 'full';
  const chooseMethod = (/** @type {string} */ objective, /** @type {string} */ adapter) => {
    const { lora_r: _rank, ...otherTexts } = texts;
    setDraft({ ...draft, texts: otherTexts, config: applyChoice(config, objective, adapter) });
  };
  const effective = settled && checked.data?.valid ? checked.data.effective_config : null;
  const renderField = (/** @type {string} */ name) => html`<${Field}
    key=${name}
    field=${fields.get(name)}
    effective=${effective?.[name]}
    value=${config[name]}
    text=${texts[name]}
    error=${shownErrors.get(`config.${name}`)}
    onChange=${(/** @type {string} */ text) => setField(name, text)}
  />`;
  const main = [...(isAdapter ? ADAPTER_FIELDS : []), ...MAIN_FIELDS];
  return html`<form onSubmit=${startRun}>
    <div class="head sticky">
      <h1 class="grow">New run</h1>
      <div class="acts">
        <button type="button" class="btn quiet" onClick=${() => setDraft(createEmptyDraft())}>Clear</button>
        <button class="btn primary" disabled=${!isReady || action.busy || isRefused}>
          ${action.busy ? 'Starting …' : 'Start the run'}
        </button>
      </div>
    </div>
    ${action.error && html`<div class="box"><${Failure} error=${action.error} /></div>`}
    <div class="two">
      <div class="side">
        <section class="box" aria-label="Model and data">
          <header><h2>Model and data</h2></header>
          <div class="form">
            <${Basics}
              values=${values}
              config=${config}
              errors=${shownErrors}
              onValue=${setValue}
              onModel=${(/** @type {string} */ text) => setField('base_model', text)}
            />
          </div>
        </section>
        <section class="box" aria-label="Method">
          <header><h2>Method</h2></header>
          <div class="inside">
            <${Choices}
              label="Objective"
              hint="What the model learns from."
              options=${objectives}
              value=${choice.objective}
              onChange=${(/** @type {string} */ name) => chooseMethod(name, choice.adapter)}
            />
            <${Choices}
              label="Trained weights"
              hint="Adapters need less memory."
              options=${ADAPTERS}
              value=${choice.adapter}
              onChange=${(/** @type {string} */ name) => chooseMethod(choice.objective, name)}
            />
            ${shownErrors.has('config.method') && html`<p class="err" id="error-method">
              <${Prose} text=${shownErrors.get('config.method')} />
            </p>`}
          </div>
          <div class="form">${main.map(renderField)}</div>
        </section>
        <${Placement} values=${values} errors=${shownErrors} onValue=${setValue} />
        <${OtherFields}
          groups=${groups}
          main=${main}
          method=${method}
          config=${config}
          errors=${shownErrors}
          control=${renderField}
        />
      </div>
      <aside class="side">
        <${Checks} isChecked=${isChecked} unreadable=${unreadable} checked=${settled ? checked : null} />
        ${isReady &&
        checked.data?.valid &&
        (estimate.data
          ? html`<${Estimate} estimate=${estimate.data} />`
          : estimate.error &&
            html`<section class="box" aria-label="Estimate">
              <header><h2>Estimate</h2></header>
              <div class="inside"><${ErrorText} error=${estimate.error} /></div>
            </section>`)}
        <${Request} body=${body} />
      </aside>
    </div>
  </form>`;
}

/**
 * A row of tiles, of which one is chosen.
 * @param {{
 *   label: string, hint: string, options: [string, string, string][], value: string,
 *   onChange: (name: string) => void,
 * }} props
 */
const Choices = ({ label, hint, options, value, onChange }) => html`<div class="f">
  <p class="legend-text"><b>${label}</b> <span class="hint">${hint}</span></p>
  <div class="choices" role="radiogroup" aria-label=${label}>
    ${options.map(
      ([name, text, description]) => html`<label class="choice">
        <input type="radio" name=${label} checked=${name === value} onChange=${() => onChange(name)} />
        <b>${text}</b>
        <small>${description}</small>
      </label>`,
    )}
  </div>
</div>`;

/**
 * @param {{
 *   values: Record<string, any>, config: Record<string, any>, errors: Map<string, string>,
 *   onValue: (name: string, value: unknown) => void, onModel: (text: string) => void,
 * }} props
 */
function Basics({ values, config, errors, onValue, onModel }) {
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
  const showError = (/** @type {string} */ name) =>
    errors.get(name) && html`<p class="err" id=${`error-${name}`}><${Prose} text=${errors.get(name)} /></p>`;
  return html`
    <div class="f w6">
      <label for="field-base_model" title="base_model">Base model</label>
      <input
        id="field-base_model"
        type="text"
        list="models"
        required
        placeholder="folder, owner/model or run_…"
        value=${config.base_model ?? ''}
        aria-invalid=${errors.has('config.base_model') ? 'true' : undefined}
        onInput=${(/** @type {any} */ event) => onModel(event.target.value)}
      />
      <datalist id="models">
        ${(models.data?.data ?? []).map((/** @type {any} */ model) => html`<option value=${model.id}></option>`)}
        ${(trained.data?.data ?? []).map(
          (/** @type {api.RunRow} */ run) => html`<option value=${run.id}>${`output of ${run.name}`}</option>`,
        )}
      </datalist>
      ${showError('config.base_model') ||
      html`<p class="hint">A folder below the models root, a model of the hub, or the ID of a finished run.</p>`}
    </div>
    <div class="f w6">
      <label for="field-name" title="name">Name</label>
      <input
        id="field-name"
        type="text"
        maxlength="200"
        placeholder="method and model"
        value=${values.name ?? ''}
        onInput=${setFromEvent('name')}
      />
      ${showError('name')}
    </div>
    <div class="f w6">
      <label for="field-dataset_id" title="dataset_id">Dataset</label>
      <select id="field-dataset_id" required value=${values.dataset_id ?? ''} onChange=${setFromEvent('dataset_id')}>
        <option value="">Choose …</option>
        ${options}
      </select>
      ${showError('dataset_id') || html`<p class="hint"><a href="/datasets">Upload another one</a></p>`}
      ${(datasets.data?.has_more || searchText) && html`<input
        type="search"
        class="small"
        placeholder="Search datasets"
        aria-label="Search datasets by name or ID"
        value=${searchText}
        onInput=${(/** @type {any} */ event) => setSearchText(event.target.value)}
      />`}
    </div>
    <div class="f w6">
      <label for="field-eval_dataset_id" title="eval_dataset_id">Eval dataset</label>
      <select
        id="field-eval_dataset_id"
        value=${values.eval_dataset_id ?? ''}
        onChange=${setFromEvent('eval_dataset_id')}
      >
        <option value="">none</option>
        ${options}
      </select>
      ${showError('eval_dataset_id')}
    </div>
    <div class="f w6">
      <label for="field-experiment_id" title="experiment_id">Experiment</label>
      <select id="field-experiment_id" value=${values.experiment_id ?? ''} onChange=${setFromEvent('experiment_id')}>
        <option value="">default</option>
        ${(experiments.data?.data ?? [])
          .filter((/** @type {any} */ experiment) => experiment.id !== DEFAULT_EXPERIMENT)
          .map((/** @type {any} */ experiment) => html`<option value=${experiment.id}>${experiment.name}</option>`)}
      </select>
      ${showError('experiment_id')}
    </div>
    <div class="f w6">
      <label for="field-tags" title="tags">Tags</label>
      <${Words}
        id="field-tags"
        words=${values.tags ?? []}
        onWords=${(/** @type {string[]} */ tags) => onValue('tags', tags)}
      />
      <p class="hint">Separated by commas.</p>
      ${showError('tags')}
    </div>
  `;
}

/**
 * Field of words that are separated by commas. Its text is its own, so that a check that arrives does not change what
 * is being typed.
 * @param {{ id: string, placeholder?: string, words: string[], onWords: (words: string[]) => void }} props
 */
function Words({ id, placeholder, words, onWords }) {
  const [text, setText] = useState(words.join(', '));
  const splitWords = (/** @type {string} */ list) =>
    list
      .split(',')
      .map((word) => word.trim())
      .filter(Boolean);
  useEffect(() => {
    if (!areEqual(splitWords(text), words)) setText(words.join(', '));
  }, [words.join('\n')]);
  const onInput = (/** @type {any} */ event) => {
    setText(event.target.value);
    onWords(splitWords(event.target.value));
  };
  return html`<input id=${id} type="text" placeholder=${placeholder} value=${text} onInput=${onInput} />`;
}

/**
 * Where the run may start, and how often it is tried again.
 * @param {{
 *   values: Record<string, any>, errors: Map<string, string>, onValue: (name: string, value: unknown) => void,
 * }} props
 */
function Placement({ values, errors, onValue }) {
  const backends = useResource((signal) => get('/v1/backends', {}, signal), 'backends');
  const resources = values.resources ?? {};
  const setResource = (/** @type {string} */ name, /** @type {unknown} */ value) => {
    const { [name]: _before, ...others } = resources;
    const next = value === null ? others : { ...others, [name]: value };
    onValue('resources', Object.keys(next).length ? next : null);
  };
  const readNumber = (/** @type {any} */ event) =>
    event.target.value.trim() === '' ? null : Number(event.target.value);
  // A number, `all`, or what the service refuses by name.
  const readCount = (/** @type {any} */ event) =>
    /^\s*\d*\s*$/.test(event.target.value) ? readNumber(event) : event.target.value.trim();
  const showError = (/** @type {string} */ name) =>
    errors.get(name) && html`<p class="err" id=${`error-${name}`}><${Prose} text=${errors.get(name)} /></p>`;
  const countSet = ['resources', 'priority', 'max_restarts', 'backend'].filter((name) => values[name] != null).length;
  return html`<section class="box" aria-label="Placement">
    <details class="group">
      <summary>Placement and restarts<span class="muted num">${countSet > 0 ? `${countSet} set` : ''}</span></summary>
      <div class="form">
        <div class="f">
          <label for="field-kind" title="resources.kind">Device</label>
          <select
            id="field-kind"
            value=${resources.kind ?? ''}
            onChange=${(/** @type {any} */ event) => setResource('kind', event.target.value || null)}
          >
            <option value="">as the run needs</option>
            <option value="cuda">GPU</option>
            <option value="cpu">CPU</option>
          </select>
          ${showError('resources.kind')}
        </div>
        <div class="f">
          <label for="field-devices" title="resources.devices">Devices</label>
          <input
            id="field-devices"
            type="text"
            placeholder="1"
            value=${resources.devices ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('devices', readCount(event))}
          />
          ${showError('resources.devices') ||
          html`<p class="hint">
            Devices in all, of one worker unless there are several hosts: a number, or <code>all</code>.
          </p>`}
        </div>
        <div class="f">
          <label for="field-hosts" title="resources.hosts">Hosts</label>
          <input
            id="field-hosts"
            type="number"
            min="1"
            max="1024"
            placeholder="1"
            value=${resources.hosts ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('hosts', readNumber(event))}
          />
          ${showError('resources.hosts') ||
          html`<p class="hint">Workers that train it together, each with its share of the devices.</p>`}
        </div>
        <div class="f">
          <label for="field-sharding" title="resources.sharding">Model on several devices</label>
          <select
            id="field-sharding"
            value=${resources.sharding ?? ''}
            onChange=${(/** @type {any} */ event) => setResource('sharding', event.target.value || null)}
          >
            <option value="">divided only if none holds it</option>
            <option value="none">a replica on each</option>
            <option value="full">divided among them</option>
          </select>
          ${showError('resources.sharding')}
        </div>
        <div class="f">
          <label for="field-gpu" title="resources.gpu">GPU</label>
          <input
            id="field-gpu"
            type="text"
            placeholder="any"
            value=${resources.gpu ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('gpu', event.target.value.trim() || null)}
          />
          ${showError('resources.gpu') || html`<p class="hint">Whole words of its name, such as <code>h200</code>.</p>`}
        </div>
        <div class="f">
          <label for="field-sequence_parallel" title="resources.sequence_parallel">Devices that share a sequence</label>
          <input
            id="field-sequence_parallel"
            type="number"
            min="1"
            max="1024"
            placeholder="1"
            value=${resources.sequence_parallel ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('sequence_parallel', readNumber(event))}
          />
          ${showError('resources.sequence_parallel') ||
          html`<p class="hint">For long sequences: each device has a part of every sequence.</p>`}
        </div>
        <div class="f">
          <label for="field-expert_parallel" title="resources.expert_parallel">Devices that share the experts</label>
          <input
            id="field-expert_parallel"
            type="number"
            min="1"
            max="1024"
            placeholder="1"
            value=${resources.expert_parallel ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('expert_parallel', readNumber(event))}
          />
          ${showError('resources.expert_parallel') ||
          html`<p class="hint">
            Of a mixture-of-experts model: each device has a part of the experts of every layer.
          </p>`}
        </div>
        <div class="f">
          <label for="field-memory_mb" title="resources.memory_mb">Least memory, MiB</label>
          <input
            id="field-memory_mb"
            type="number"
            min="1"
            placeholder="from the estimate"
            value=${resources.memory_mb ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('memory_mb', readNumber(event))}
          />
          ${showError('resources.memory_mb')}
        </div>
        <div class="f">
          <label for="field-labels" title="resources.labels">Labels</label>
          <${Words}
            id="field-labels"
            placeholder="any worker"
            words=${resources.labels ?? []}
            onWords=${(/** @type {string[]} */ labels) => setResource('labels', labels.length ? labels : null)}
          />
          ${showError('resources.labels') ||
          html`<p class="hint">Labels that the worker must have, separated by commas.</p>`}
        </div>
        <div class="f">
          <label for="field-priority" title="priority">Priority</label>
          <input
            id="field-priority"
            type="number"
            min="-1000"
            max="1000"
            placeholder="0"
            value=${values.priority ?? ''}
            onInput=${(/** @type {any} */ event) => onValue('priority', readNumber(event))}
          />
          ${showError('priority') || html`<p class="hint">Runs with higher priority start first.</p>`}
        </div>
        <div class="f">
          <label for="field-max_restarts" title="max_restarts">Restarts</label>
          <input
            id="field-max_restarts"
            type="number"
            min="0"
            max="100"
            placeholder=${DEFAULT_RESTARTS}
            value=${values.max_restarts ?? ''}
            onInput=${(/** @type {any} */ event) => onValue('max_restarts', readNumber(event))}
          />
          ${showError('max_restarts') ||
          html`<p class="hint">Most restarts after losses since the last new checkpoint.</p>`}
        </div>
        <div class="f">
          <label for="field-backend" title="backend">Backend</label>
          <select
            id="field-backend"
            value=${values.backend ?? ''}
            onChange=${(/** @type {any} */ event) => onValue('backend', event.target.value || null)}
          >
            <option value="">default (celery)</option>
            ${(backends.data?.data ?? [])
              .filter((/** @type {any} */ backend) => backend.name !== 'celery' && !backend.unavailable_reason)
              .map((/** @type {any} */ backend) => html`<option value=${backend.name}>${backend.name}</option>`)}
          </select>
          ${showError('backend')}
        </div>
      </div>
    </details>
  </section>`;
}

/**
 * @param {{
 *   field: FormField, effective: unknown, value: unknown, text: string | undefined, error: string | undefined,
 *   onChange: (text: string) => void,
 * }} props `effective`: value that a run would have, if the request is valid.
 */
function Field({ field, effective, value, text, error, onChange }) {
  const id = `field-${field.name}`;
  const shownText = text ?? formatValue(field, value);
  const attributes = { id, 'aria-describedby': `${id}-about`, 'aria-invalid': error ? 'true' : undefined };
  const onInput = (/** @type {any} */ event) => onChange(event.target.value);
  const effectiveDefault = effective === undefined || value !== undefined ? field.fallback : effective;
  const fallback =
    effectiveDefault == null || isDefault({ ...field, fallback: undefined }, effectiveDefault)
      ? 'none'
      : formatValue(field, effectiveDefault);
  let control;
  if (field.kind === 'boolean' || field.kind === 'choice') {
    const choices = field.kind === 'boolean' ? ['true', 'false'] : field.choices;
    control = html`<select ...${attributes} value=${shownText} onChange=${onInput}>
      <option value="">${`default (${fallback})`}</option>
      ${field.isNullable && field.fallback != null && html`<option value=${NONE}>${NONE}</option>`}
      ${choices.map((choice) => html`<option value=${choice}>${choice}</option>`)}
    </select>`;
  } else if (field.kind === 'list' || field.kind === 'json') {
    control = html`<textarea
      ...${attributes}
      rows="2"
      placeholder=${fallback}
      value=${shownText}
      onInput=${onInput}
    ></textarea>`;
  } else {
    control = html`<input
      ...${attributes}
      type="text"
      inputmode=${field.kind === 'number' || field.kind === 'integer' ? 'decimal' : undefined}
      placeholder=${fallback}
      value=${shownText}
      onInput=${onInput}
    />`;
  }
  return html`<div class=${field.kind === 'json' ? 'f w12' : 'f'}>
    <label for=${id} title=${field.name}>${formatLabel(field.name)}</label>
    ${control}
    ${error
      ? html`<p class="err" id=${`${id}-about`}><${Prose} text=${error} /></p>`
      : html`<p class="hint" id=${`${id}-about`}>
          <${Prose} text=${field.isNullable && field.fallback != null
            ? `${field.description} \`${NONE}\`: no value.`
            : field.description} />
        </p>`}
  </div>`;
}

/** @param {string} name */
const formatLabel = (name) => {
  const words = name
    .replaceAll('_', ' ')
    .replace(/\blora\b/, 'LoRA')
    .replace(/\bgguf\b/, 'GGUF');
  return words.charAt(0).toUpperCase() + words.slice(1);
};

/**
 * @param {{
 *   groups: ReturnType<typeof readGroups>, main: string[], method: string, config: Record<string, unknown>,
 *   errors: Map<string, string>, control: (name: string) => any,
 * }} props
 */
function OtherFields({ groups, main, method, config, errors, control }) {
  const [text, setText] = useState('');
  const nameSearch = text.trim().toLowerCase().replaceAll(' ', '_');
  const isShown = (/** @type {FormField} */ field) =>
    !WITH_OWN_CONTROL.has(field.name) &&
    (nameSearch
      ? field.name.includes(nameSearch) || field.description.toLowerCase().includes(text.trim().toLowerCase())
      : !main.includes(field.name) && (!OBJECTIVES.some(([name]) => name === field.name) || field.name === method));
  return html`<section class="box" aria-label="More fields">
    <header>
      <h2>More fields</h2>
      <span class="grow"></span>
      <input
        type="search"
        class="small"
        placeholder="Search fields"
        aria-label="Search fields of the configuration"
        value=${text}
        onInput=${(/** @type {any} */ event) => setText(event.target.value)}
      />
    </header>
    ${groups.map(({ group, fields }) => {
      const shownFields = fields.filter(isShown);
      if (shownFields.length === 0) return null;
      const countSet = shownFields.filter((field) => field.name in config).length;
      const hasErrors = shownFields.some((field) => errors.has(`config.${field.name}`));
      return html`<details class="group" key=${group} open=${nameSearch !== '' || hasErrors}>
        <summary>
          ${group}
          <span class="muted num">
            ${format.counted(shownFields.length, 'field')}
            ${countSet > 0 ? `, ${countSet} set` : ''}
          </span>
        </summary>
        <div class="form">${shownFields.map((field) => control(field.name))}</div>
      </details>`;
    })}
  </section>`;
}

/**
 * What the service says about a request: its checks, or why it cannot check it.
 * @param {import('../resource.js').Resource<any>} checked
 * @returns {{ valid: boolean, errors: any[], warnings: any[] } | undefined}
 */
const readCheck = ({ data, error }) =>
  error?.errors.length ? { valid: false, errors: error.errors, warnings: [] } : error ? undefined : data;

/**
 * Show the control of a field of the request.
 * @param {string} name Such as `config.dpo.beta` or `resources.kind`.
 */
function focusField(name) {
  const control = document.getElementById(`field-${name.replace(/^(config|resources)\./, '').split('.')[0]}`);
  control?.closest('details')?.setAttribute('open', '');
  control?.focus();
  control?.scrollIntoView({ block: 'center' });
}

/**
 * Why a text is not a value of its field.
 * @param {FormField} field
 * @param {string} text
 */
function describeProblem(field, text) {
  try {
    parseValue(field, text);
    return '';
  } catch (error) {
    return /** @type {Error} */ (error).message;
  }
}

/**
 * @param {{
 *   isChecked: boolean, unreadable: { field: string, message: string }[],
 *   checked: import('../resource.js').Resource<any> | null,
 * }} props
 */
function Checks({ isChecked, unreadable, checked }) {
  const result = checked && readCheck(checked);
  const names = new Set(unreadable.map(({ field }) => field));
  const errors = [
    ...unreadable,
    ...(result?.errors ?? []).filter((/** @type {any} */ error) => !names.has(error.field)),
  ];
  return html`<section class="box" aria-label="Checks">
    <header><h2>Checks</h2></header>
    <div class="inside" aria-live="polite">
      ${!isChecked && errors.length === 0 && html`<p class="muted">Choose a base model and a dataset.</p>`}
      ${isChecked &&
      !result &&
      (checked?.error ? html`<${ErrorText} error=${checked.error} />` : html`<p class="muted">Checking …</p>`)}
      ${result?.valid && errors.length === 0 && html`<p><span class="tag best">valid</span></p>`}
      ${(result || errors.length > 0) && html`<ul class="checks">
        ${errors.map(
          (/** @type {any} */ error) => html`<li class="error-text">
            <button type="button" class="link" onClick=${() => focusField(error.field)}>
              ${error.field}
            </button> <${Prose} text=${error.message} />
          </li>`,
        )}
        ${(result?.warnings ?? []).map(
          (/** @type {any} */ warning) => html`<li class="warning-text"><${Prose} text=${warning.message} /></li>`,
        )}
      </ul>`}
    </div>
  </section>`;
}

/** @type {Record<string, string>} What an estimate is based on. */
const BASIS_LABELS = {
  formula: 'by formula',
  history: 'from earlier runs of this model',
  comparable: 'from runs on this kind of device',
  assumed: 'with an assumed speed',
};

/** @param {{ estimate: any }} props */
function Estimate({ estimate }) {
  const { memory_mb: memory, device } = estimate;
  const others = estimate.fits.slice(1);
  const parts = Object.entries(memory ?? {}).filter(([name, size]) => name !== 'total' && size > 0);
  const scale = Math.max(
    device.memory_mb ?? 0,
    memory?.total ?? 0,
    parts.reduce((sum, [, size]) => sum + size, 0),
  );
  const labels = parts.map(([name, size]) => `${name.replaceAll('_', ' ')} ${format.mebibytes(size)}`);
  const fit = estimate.fits[0];
  return html`<section class="box" aria-label="Estimate">
    <header><h2>Estimate</h2><span class="sub">${device.name}</span></header>
    <div class="inside">
      ${memory && html`
        <div class="row between">
          <span>Memory</span>
          <b class="num">
            ${format.mebibytes(memory.total)}
            ${device.memory_mb && ` of ${format.mebibytes(device.memory_mb)}`}
          </b>
        </div>
        <div class="stack" role="img" aria-label=${`Memory: ${labels.join(', ')}`}>
          ${parts.map(
            ([, size], index) => html`<i style=${{
              width: `${(100 * size) / scale}%`,
              background: `var(--c${(index % 8) + 1})`,
            }}></i>`,
          )}
        </div>
        <div class="legend">
          ${parts.map(
            ([name, size], index) => html`<span>
              <i class="swatch" style=${{ background: `var(--c${(index % 8) + 1})` }}></i>
              ${name.replaceAll('_', ' ')} ${format.mebibytes(size)}
            </span>`,
          )}
        </div>
      `}
      ${fit && fit.fits === false && html`
        <p class="error-text"><${Prose} text=${fit.reason} /></p>
        ${fit.advice.length > 0 && html`<ul class="checks">
          ${fit.advice.map(
            (/** @type {string} */ sentence) => html`<li class="sub"><${Prose} text=${sentence} /></li>`,
          )}
        </ul>`}
      `}
      ${others.length > 0 && html`<details>
        <summary class="sub">${format.counted(others.length, 'other device')}</summary>
        <ul class="checks">
          ${others.map(
            (/** @type {any} */ otherFit) => html`<li class=${otherFit.fits === false ? 'warning-text' : 'sub'}>
              ${otherFit.device.name}: <${Prose} text=${otherFit.reason} />
            </li>`,
          )}
        </ul>
      </details>`}
      <dl class="kv left">
        <dt>Steps</dt>
        <dd class="num">${format.integer(estimate.steps)}</dd>
        <dt>Tokens</dt>
        <dd class="num">${format.integer(estimate.tokens)}</dd>
        <dt>Time</dt>
        <dd class="num">
          ${estimate.seconds != null && estimate.seconds < 1 ? 'less than 1 s' : format.duration(estimate.seconds)}
        </dd>
        ${estimate.cost && html`
          <dt>Cost</dt>
          <dd class="num">${estimate.cost.amount?.toFixed(2)} ${estimate.cost.currency}</dd>
        `}
      </dl>
      <p class="sub">
        ${Object.entries(estimate.confidence)
          .filter(([, basis]) => basis != null)
          .map(
            ([name, basis]) =>
              `${name === 'seconds' ? 'time' : 'memory'} ${BASIS_LABELS[/** @type {string} */ (basis)] ?? basis}`,
          )
          .join('; ')
          .replace(/^./, (first) => first.toUpperCase())}
      </p>
      ${estimate.unknown.length > 0 && html`<details>
        <summary class="sub">${format.counted(estimate.unknown.length, 'value')} unknown</summary>
        <ul class="checks">
          ${estimate.unknown.map(
            (/** @type {any} */ unknown) => html`<li class="sub">
              <code>${unknown.field}</code> <${Prose} text=${unknown.reason} />
            </li>`,
          )}
        </ul>
      </details>`}
      ${estimate.assumptions.length > 0 && html`<details>
        <summary class="sub">Assumptions</summary>
        <ul class="checks">
          ${estimate.assumptions.map(
            (/** @type {string} */ sentence) => html`<li class="sub"><${Prose} text=${sentence} /></li>`,
          )}
        </ul>
      </details>`}
    </div>
  </section>`;
}

/** @param {{ body: any }} props */
function Request({ body }) {
  const [form, setForm] = useState('yaml');
  const text = form === 'yaml' ? formatYaml(body) : formatCurl(location.origin, body);
  return html`<section class="box" aria-label="Request">
    <header>
      <h2>Request</h2>
      <span class="grow"></span>
      <${Choice}
        label="Form of the request"
        value=${form}
        options=${[
          ['yaml', 'run.yaml'],
          ['curl', 'curl'],
        ]}
        onChange=${setForm}
      />
    </header>
    <pre class="code" tabindex="0" aria-label="Text of the request">${text}</pre>
    <div class="inside row">
      <${Copy} text=${text} shown="Copy" label="Copy the request" />
      <span class="sub">
        ${form === 'yaml' ? 'for anneal runs create -f run.yaml' : 'with your key in ANNEAL_API_KEY'}
      </span>
    </div>
  </section>`;
}
