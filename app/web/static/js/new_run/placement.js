// Where a new run may start, and how often it is tried again.

import { html } from '../../vendor/preact.js';
import { get } from '../api.js';
import { useResource } from '../resource.js';
import { fieldAttributes, RequestField, Words } from './fields.js';

export const DEFAULT_RESTARTS = 3;

/** @param {any} event */
const readNumber = (event) => (event.target.value.trim() === '' ? null : Number(event.target.value));

/** @param {any} event A number, `all`, or what the service refuses by name. */
const readCount = (event) => (/^\s*\d*\s*$/.test(event.target.value) ? readNumber(event) : event.target.value.trim());

/** @param {any} event */
const readText = (event) => event.target.value.trim() || null;

/**
 * Where the run may start, and how often it is tried again.
 * @param {{
 *   values: Record<string, any>, errors: Map<string, string>, onValue: (name: string, value: unknown) => void,
 * }} props
 */
export function Placement({ values, errors, onValue }) {
  const backends = useResource((signal) => get('/v1/backends', {}, signal), 'backends');
  const resources = values.resources ?? {};
  const setValue = (/** @type {string} */ path, /** @type {unknown} */ value) => {
    const [group, name] = path.split('.');
    const { [name ?? '']: _before, ...others } = resources;
    const next = value === null ? others : { ...others, [name ?? '']: value };
    onValue(group ?? path, name === undefined ? value : Object.keys(next).length > 0 ? next : null);
  };
  const readValue = (/** @type {string} */ path) =>
    path.startsWith('resources.') ? resources[path.slice('resources.'.length)] : values[path];

  /**
   * @param {string} path @param {string} label @param {any} hint @param {(event: any) => unknown} read
   * @param {Record<string, unknown>} attributes Of the input.
   */
  const input = (path, label, hint, read, attributes) => html`<${RequestField}
    path=${path}
    label=${label}
    hint=${hint}
    errors=${errors}
  >
    <input
      ...${fieldAttributes(errors, path)}
      ...${attributes}
      value=${readValue(path) ?? ''}
      onInput=${(/** @type {any} */ event) => setValue(path, read(event))}
    />
  <//>`;

  /** @param {string} path @param {string} label @param {[string, string][]} options Values with their texts. */
  const select = (path, label, options) => html`<${RequestField} path=${path} label=${label} errors=${errors}>
    <select
      ...${fieldAttributes(errors, path)}
      value=${readValue(path) ?? ''}
      onChange=${(/** @type {any} */ event) => setValue(path, event.target.value || null)}
    >
      ${options.map(([value, text]) => html`<option value=${value}>${text}</option>`)}
    </select>
  <//>`;

  const positive = { type: 'number', min: '1', max: '1024', placeholder: '1' };
  const otherBackends = (backends.data?.data ?? []).filter(
    (/** @type {any} */ backend) => backend.name !== 'celery' && !backend.unavailable_reason,
  );
  const countSet = ['resources', 'priority', 'max_restarts', 'backend'].filter((name) => values[name] != null).length;
  return html`<section class="box" aria-label="Placement">
    <details class="group">
      <summary>Placement and restarts<span class="muted num">${countSet > 0 ? `${countSet} set` : ''}</span></summary>
      <div class="form">
        ${select('resources.kind', 'Device', [
          ['', 'as the run needs'],
          ['cuda', 'GPU'],
          ['cpu', 'CPU'],
        ])}
        ${input(
          'resources.devices',
          'Devices',
          html`Devices in all, of one worker unless there are several hosts: a number, or <code>all</code>.`,
          readCount,
          { type: 'text', placeholder: '1' },
        )}
        ${input(
          'resources.hosts',
          'Hosts',
          'Workers that train it together, each with its share of the devices.',
          readNumber,
          positive,
        )}
        ${select('resources.sharding', 'Model on several devices', [
          ['', 'divided only if none holds it'],
          ['none', 'a replica on each'],
          ['full', 'divided among them'],
        ])}
        ${input('resources.gpu', 'GPU', html`Whole words of its name, such as <code>h200</code>.`, readText, {
          type: 'text',
          placeholder: 'any',
        })}
        ${input(
          'resources.sequence_parallel',
          'Devices that share a sequence',
          'For long sequences: each device has a part of every sequence.',
          readNumber,
          positive,
        )}
        ${input(
          'resources.expert_parallel',
          'Devices that share the experts',
          'Of a mixture-of-experts model: each device has a part of the experts of every layer.',
          readNumber,
          positive,
        )}
        ${input('resources.memory_mb', 'Least memory, MiB', null, readNumber, {
          type: 'number',
          min: '1',
          placeholder: 'from the estimate',
        })}
        <${RequestField}
          path="resources.labels"
          label="Labels"
          hint="Labels that the worker must have, separated by commas."
          errors=${errors}
        >
          <${Words}
            ...${fieldAttributes(errors, 'resources.labels')}
            placeholder="any worker"
            words=${resources.labels ?? []}
            onWords=${(/** @type {string[]} */ labels) => setValue('resources.labels', labels.length ? labels : null)}
          />
        <//>
        ${input('priority', 'Priority', 'Runs with higher priority start first.', readNumber, {
          type: 'number',
          min: '-1000',
          max: '1000',
          placeholder: '0',
        })}
        ${input('max_restarts', 'Restarts', 'Most restarts after losses since the last new checkpoint.', readNumber, {
          type: 'number',
          min: '0',
          max: '100',
          placeholder: DEFAULT_RESTARTS,
        })}
        ${select('backend', 'Backend', [
          ['', 'default (celery)'],
          ...otherBackends.map((/** @type {any} */ backend) => [backend.name, backend.name]),
        ])}
      </div>
    </details>
  </section>`;
}
