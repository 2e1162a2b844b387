// Controls of the fields of a new run.

import { html, useEffect, useState } from '../../vendor/preact.js';
import { Prose } from '../components/states.js';
import * as format from '../format.js';
import { OBJECTIVES } from '../methods.js';
import { areEqual, formatValue, isDefault, NONE } from '../new_run_form.js';

/** @import { FormField, readGroups } from '../new_run_form.js' */

/** Fields with controls of their own. */
const WITH_OWN_CONTROL = new Set(['base_model', 'method']);

/**
 * Error of a field of the request, which `describeError` ties to its control.
 * @param {Map<string, string>} errors By name of the field.
 * @param {string} name
 */
const showError = (errors, name) =>
  errors.get(name) && html`<p class="err" id=${`error-${name}`}><${Prose} text=${errors.get(name)} /></p>`;

/**
 * Attributes of the control of a field of the request.
 * @param {Map<string, string>} errors By name of the field.
 * @param {string} name
 */
const describeError = (errors, name) =>
  errors.has(name) ? { 'aria-invalid': 'true', 'aria-describedby': `error-${name}` } : {};

/**
 * A control of the request with its label, and below it the error of its field, or a hint.
 * @param {{
 *   path: string, label: string, errors: Map<string, string>, children: any, hint?: any, title?: string,
 *   wide?: boolean,
 * }} props `path`: name of the field in the request; `title`: the same as users know it.
 */
export const RequestField = ({ path, label, errors, children, hint, title = path, wide }) => html`<div class=${wide
  ? 'f w6'
  : 'f'}>
  <label for=${fieldId(path)} title=${title}>${label}</label>
  ${children}
  ${showError(errors, path) || (hint && html`<p class="hint">${hint}</p>`)}
</div>`;

/**
 * Attributes of the control in a `RequestField`.
 * @param {Map<string, string>} errors By name of the field.
 * @param {string} path
 */
export const fieldAttributes = (errors, path) => ({ id: fieldId(path), ...describeError(errors, path) });

/** @param {string} path */
const fieldId = (path) => `field-${path.split('.').at(-1)}`;

/**
 * A row of tiles, of which one is chosen.
 * @param {{
 *   label: string, hint: string, options: [string, string, string][], value: string,
 *   onChange: (name: string) => void,
 * }} props
 */
export const Choices = ({ label, hint, options, value, onChange }) => html`<div class="f">
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
 * Field of words that are separated by commas. Its text is its own, so that a check that arrives does not change what
 * is being typed.
 * @param {{ words: string[], onWords: (words: string[]) => void, [attribute: string]: unknown }} props
 */
export function Words({ words, onWords, ...attributes }) {
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
  return html`<input ...${attributes} type="text" value=${text} onInput=${onInput} />`;
}

/**
 * @param {{
 *   field: FormField, effective: unknown, value: unknown, text: string | undefined, error: string | undefined,
 *   onChange: (text: string) => void,
 * }} props `effective`: value that a run would have, if the request is valid.
 */
export function Field({ field, effective, value, text, error, onChange }) {
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
export function OtherFields({ groups, main, method, config, errors, control }) {
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
