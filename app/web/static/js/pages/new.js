// New run: a form from the schema of the configuration, validated and estimated as one types.

import { html, useLayoutEffect, useMemo, useRef, useState } from '../../vendor/preact.js';
import { get, createIdempotencyKey, post } from '../api.js';
import { Choice, Copy } from '../components/controls.js';
import { ErrorText, Failure, Loading, Prose } from '../components/states.js';
import { ADAPTERS, readChoice, OBJECTIVES, applyChoice } from '../methods.js';
import {
  buildRequest,
  formatCurl,
  formatYaml,
  isDefault,
  parseValue,
  readFieldsOfConfig,
  readGroups,
} from '../new_run_form.js';
import { Basics, DEFAULT_EXPERIMENT } from '../new_run/basics.js';
import { Checks, readCheck } from '../new_run/checks.js';
import { Estimate } from '../new_run/estimate.js';
import { Choices, Field, OtherFields } from '../new_run/fields.js';
import { DEFAULT_RESTARTS, Placement } from '../new_run/placement.js';
import { useAction, useResource, useSettled } from '../resource.js';
import { query, useNavigation } from '../router.js';
import { hasScope } from '../session.js';

/** @import * as api from '../api_types.js' */
/** @import { FormField } from '../new_run_form.js' */

export const title = 'New run';

/** Drafts are kept by the address, for a reload of the page. */
const DRAFT_KEY = 'anneal.new-run ';
const SETTLE_MS = 400;
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
  const navigate = useNavigation();
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
      <aside class="side follows">
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
