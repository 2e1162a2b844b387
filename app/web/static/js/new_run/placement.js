// Where a new run may start, and how often it is tried again.

import { html } from '../../vendor/preact.js';
import { get } from '../api.js';
import { useResource } from '../resource.js';
import { describeError, showError, Words } from './fields.js';

export const DEFAULT_RESTARTS = 3;

/**
 * Where the run may start, and how often it is tried again.
 * @param {{
 *   values: Record<string, any>, errors: Map<string, string>, onValue: (name: string, value: unknown) => void,
 * }} props
 */
export function Placement({ values, errors, onValue }) {
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
  const countSet = ['resources', 'priority', 'max_restarts', 'backend'].filter((name) => values[name] != null).length;
  return html`<section class="box" aria-label="Placement">
    <details class="group">
      <summary>Placement and restarts<span class="muted num">${countSet > 0 ? `${countSet} set` : ''}</span></summary>
      <div class="form">
        <div class="f">
          <label for="field-kind" title="resources.kind">Device</label>
          <select
            id="field-kind"
            ...${describeError(errors, 'resources.kind')}
            value=${resources.kind ?? ''}
            onChange=${(/** @type {any} */ event) => setResource('kind', event.target.value || null)}
          >
            <option value="">as the run needs</option>
            <option value="cuda">GPU</option>
            <option value="cpu">CPU</option>
          </select>
          ${showError(errors, 'resources.kind')}
        </div>
        <div class="f">
          <label for="field-devices" title="resources.devices">Devices</label>
          <input
            id="field-devices"
            ...${describeError(errors, 'resources.devices')}
            type="text"
            placeholder="1"
            value=${resources.devices ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('devices', readCount(event))}
          />
          ${showError(errors, 'resources.devices') ||
          html`<p class="hint">
            Devices in all, of one worker unless there are several hosts: a number, or <code>all</code>.
          </p>`}
        </div>
        <div class="f">
          <label for="field-hosts" title="resources.hosts">Hosts</label>
          <input
            id="field-hosts"
            ...${describeError(errors, 'resources.hosts')}
            type="number"
            min="1"
            max="1024"
            placeholder="1"
            value=${resources.hosts ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('hosts', readNumber(event))}
          />
          ${showError(errors, 'resources.hosts') ||
          html`<p class="hint">Workers that train it together, each with its share of the devices.</p>`}
        </div>
        <div class="f">
          <label for="field-sharding" title="resources.sharding">Model on several devices</label>
          <select
            id="field-sharding"
            ...${describeError(errors, 'resources.sharding')}
            value=${resources.sharding ?? ''}
            onChange=${(/** @type {any} */ event) => setResource('sharding', event.target.value || null)}
          >
            <option value="">divided only if none holds it</option>
            <option value="none">a replica on each</option>
            <option value="full">divided among them</option>
          </select>
          ${showError(errors, 'resources.sharding')}
        </div>
        <div class="f">
          <label for="field-gpu" title="resources.gpu">GPU</label>
          <input
            id="field-gpu"
            ...${describeError(errors, 'resources.gpu')}
            type="text"
            placeholder="any"
            value=${resources.gpu ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('gpu', event.target.value.trim() || null)}
          />
          ${showError(errors, 'resources.gpu') ||
          html`<p class="hint">Whole words of its name, such as <code>h200</code>.</p>`}
        </div>
        <div class="f">
          <label for="field-sequence_parallel" title="resources.sequence_parallel">Devices that share a sequence</label>
          <input
            id="field-sequence_parallel"
            ...${describeError(errors, 'resources.sequence_parallel')}
            type="number"
            min="1"
            max="1024"
            placeholder="1"
            value=${resources.sequence_parallel ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('sequence_parallel', readNumber(event))}
          />
          ${showError(errors, 'resources.sequence_parallel') ||
          html`<p class="hint">For long sequences: each device has a part of every sequence.</p>`}
        </div>
        <div class="f">
          <label for="field-expert_parallel" title="resources.expert_parallel">Devices that share the experts</label>
          <input
            id="field-expert_parallel"
            ...${describeError(errors, 'resources.expert_parallel')}
            type="number"
            min="1"
            max="1024"
            placeholder="1"
            value=${resources.expert_parallel ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('expert_parallel', readNumber(event))}
          />
          ${showError(errors, 'resources.expert_parallel') ||
          html`<p class="hint">
            Of a mixture-of-experts model: each device has a part of the experts of every layer.
          </p>`}
        </div>
        <div class="f">
          <label for="field-memory_mb" title="resources.memory_mb">Least memory, MiB</label>
          <input
            id="field-memory_mb"
            ...${describeError(errors, 'resources.memory_mb')}
            type="number"
            min="1"
            placeholder="from the estimate"
            value=${resources.memory_mb ?? ''}
            onInput=${(/** @type {any} */ event) => setResource('memory_mb', readNumber(event))}
          />
          ${showError(errors, 'resources.memory_mb')}
        </div>
        <div class="f">
          <label for="field-labels" title="resources.labels">Labels</label>
          <${Words}
            id="field-labels"
            ...${describeError(errors, 'resources.labels')}
            placeholder="any worker"
            words=${resources.labels ?? []}
            onWords=${(/** @type {string[]} */ labels) => setResource('labels', labels.length ? labels : null)}
          />
          ${showError(errors, 'resources.labels') ||
          html`<p class="hint">Labels that the worker must have, separated by commas.</p>`}
        </div>
        <div class="f">
          <label for="field-priority" title="priority">Priority</label>
          <input
            id="field-priority"
            ...${describeError(errors, 'priority')}
            type="number"
            min="-1000"
            max="1000"
            placeholder="0"
            value=${values.priority ?? ''}
            onInput=${(/** @type {any} */ event) => onValue('priority', readNumber(event))}
          />
          ${showError(errors, 'priority') || html`<p class="hint">Runs with higher priority start first.</p>`}
        </div>
        <div class="f">
          <label for="field-max_restarts" title="max_restarts">Restarts</label>
          <input
            id="field-max_restarts"
            ...${describeError(errors, 'max_restarts')}
            type="number"
            min="0"
            max="100"
            placeholder=${DEFAULT_RESTARTS}
            value=${values.max_restarts ?? ''}
            onInput=${(/** @type {any} */ event) => onValue('max_restarts', readNumber(event))}
          />
          ${showError(errors, 'max_restarts') ||
          html`<p class="hint">Most restarts after losses since the last new checkpoint.</p>`}
        </div>
        <div class="f">
          <label for="field-backend" title="backend">Backend</label>
          <select
            id="field-backend"
            ...${describeError(errors, 'backend')}
            value=${values.backend ?? ''}
            onChange=${(/** @type {any} */ event) => onValue('backend', event.target.value || null)}
          >
            <option value="">default (celery)</option>
            ${(backends.data?.data ?? [])
              .filter((/** @type {any} */ backend) => backend.name !== 'celery' && !backend.unavailable_reason)
              .map((/** @type {any} */ backend) => html`<option value=${backend.name}>${backend.name}</option>`)}
          </select>
          ${showError(errors, 'backend')}
        </div>
      </div>
    </details>
  </section>`;
}
