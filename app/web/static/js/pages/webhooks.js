// Webhooks: addresses to which events are sent, and the deliveries of each.

import { html, useState } from '../../vendor/preact.js';
import { get, post, sendRequest } from '../api.js';
import { Choice, Copy, Dialog, labelStatus, STATUSES } from '../components/controls.js';
import { DeleteDialog, FormDialog } from '../components/dialogs.js';
import { Icon } from '../components/icon.js';
import { PageButtons } from '../components/pages.js';
import { Empty, ErrorText, Loaded } from '../components/states.js';
import * as format from '../format.js';
import { useAction, useNow, useResource } from '../resource.js';
import { query, setQuery, useNavigation } from '../router.js';
import { hasScope } from '../session.js';

/** @import * as api from '../api_types.js' */

export const title = 'Webhooks';

const EVERY_MS = 3000;
/** @type {Record<string, string>} Words for the types of events. */
const TYPES = { end: 'Ends of runs', status: 'Status changes', progress: 'Progress' };
/** @type {Record<string, string>} Words for the types of events of the format `openai`. */
const JOB_TYPES = {
  'fine_tuning.job.succeeded': 'Jobs that succeed',
  'fine_tuning.job.failed': 'Jobs that fail',
  'fine_tuning.job.cancelled': 'Jobs that are cancelled',
};
/** @type {[string, string][]} */
const FORMATS = [
  ['standard', 'Signed JSON'],
  ['slack', 'Slack, Mattermost'],
  ['openai', 'OpenAI'],
];
/** @type {[string, string][]} */
const TASKS = [
  ['', 'All tasks'],
  ['train', 'Training'],
  ['evaluate', 'Evaluation'],
  ['predict', 'Prediction'],
  ['export', 'Export'],
];
/** @type {[string, string][]} */
const DELIVERY_STATUSES = [
  ['', 'All'],
  ['pending', 'Pending'],
  ['delivered', 'Delivered'],
  ['failed', 'Failed'],
];

/** @param {{ id?: string }} props */
export default function Webhooks({ id }) {
  return id ? html`<${Webhook} id=${id} />` : html`<${List} />`;
}

function List() {
  const navigate = useNavigation();
  const list = useResource((signal) => get('/v1/webhooks', { limit: 200 }, signal), 'webhooks', { everyMs: EVERY_MS });
  const [isNew, setNew] = useState(false);
  const [created, setCreated] = useState(/** @type {api.Webhook | null} */ (null));
  const now = useNow(60_000);
  return html`
    <div class="head center">
      <h1 class="grow">Webhooks</h1>
      <div class="acts">
        ${hasScope('write') && html`<button type="button" class="btn primary" onClick=${() => setNew(true)}>
          <${Icon} name="plus" />
          New webhook
        </button>`}
      </div>
    </div>
    ${isNew && html`<${EditDialog}
      onClose=${() => setNew(false)}
      onSaved=${(/** @type {api.Webhook} */ webhook) => {
        setNew(false);
        setCreated(webhook);
      }}
    />`}
    ${created && html`<${SecretDialog}
      secret=${created.secret}
      onClose=${() => navigate(`/webhooks/${created.id}`)}
    />`}
    <${Loaded} resource=${list} what="webhooks">
      ${(/** @type {api.Page<api.Webhook>} */ page) =>
        page.data.length === 0
          ? html`<section class="box">
              <${Empty} title="There are no webhooks yet.">
                <p class="muted">
                  When a run ends, a message is sent to the address of each webhook: to a program, or to a channel of
                  Slack or Mattermost.
                </p>
              <//>
            </section>`
          : html`<section class="box scroll" tabindex="0" role="region" aria-label="Webhooks">
              <table class="table">
                <thead>
                  <tr><th>Webhook</th><th>Events</th><th>State</th><th class="right">Created</th></tr>
                </thead>
                <tbody>
                  ${page.data.map(
                    (webhook) => html`<tr key=${webhook.id}>
                      <td class="what">
                        <a class="name" href=${`/webhooks/${webhook.id}`}>${webhook.name}</a>
                        <div class="sub clip">${webhook.url}</div>
                      </td>
                      <td>${describeEvents(webhook)}</td>
                      <td><${State} webhook=${webhook} now=${now} /></td>
                      <td class="right muted num nowrap" title=${webhook.created_at}>
                        ${format.ago(webhook.created_at, now)}
                      </td>
                    </tr>`,
                  )}
                </tbody>
              </table>
            </section>`}
    <//>
  `;
}

/** @param {api.Webhook} webhook */
const describeEvents = (webhook) =>
  [
    webhook.types.map((type) => TYPES[type] ?? JOB_TYPES[type] ?? type).join(', '),
    ...Object.entries(webhook.filter).map(([name, value]) => `${name}: ${[value].flat().join(', ')}`),
  ].join(' · ');

/** @param {{ webhook: api.Webhook, now: number }} props */
const State = ({ webhook, now }) =>
  html`<span class=${webhook.enabled && webhook.failing_since ? 'tag warn' : 'tag'}>
    ${!webhook.enabled
      ? 'disabled'
      : webhook.failing_since
        ? `failing since ${format.ago(webhook.failing_since, now)}`
        : 'working'}
  </span>`;

/** @param {{ id: string }} props */
function Webhook({ id }) {
  const path = `/v1/webhooks/${id}`;
  const resource = useResource((signal) => get(path, {}, signal), id, { everyMs: EVERY_MS });
  const after = query.value.get('after');
  const status = query.value.get('status') ?? '';
  const deliveries = useResource(
    (signal) => get(`${path}/deliveries`, { status, after }, signal),
    `${id} ${status} ${after}`,
    { everyMs: EVERY_MS },
  );
  const [openDialog, setOpenDialog] = useState(/** @type {'edit' | 'rotate' | 'delete' | null} */ (null));
  const [secret, setSecret] = useState(/** @type {string | null} */ (null));
  const action = useAction();
  const now = useNow(1000);
  const send = (/** @type {string} */ what) =>
    action.run(async () => {
      await post(`${path}/${what}`);
      deliveries.reload();
    });
  const setEnabled = (/** @type {boolean} */ enabled) =>
    action.run(async () => {
      await sendRequest('PATCH', path, { body: { enabled } });
      resource.reload();
    });
  return html`<${Loaded} resource=${resource} what="the webhook">
    ${(/** @type {api.Webhook} */ webhook) => html`
      <div class="head">
        <div class="grow">
          <p class="crumb"><a href="/webhooks">Webhooks</a></p>
          <h1>${webhook.name}</h1>
          <p class="muted clip">${webhook.url}</p>
          <div class="meta"><${State} webhook=${webhook} now=${now} /><span>${describeEvents(webhook)}</span></div>
        </div>
        ${hasScope('write') && html`<div class="acts">
          <button
            type="button"
            class="btn primary"
            disabled=${action.busy || !webhook.enabled}
            onClick=${() => send('test')}
          >
            Send a test
          </button>
          <button type="button" class="btn" onClick=${() => setOpenDialog('edit')}>Edit …</button>
          <button
            type="button"
            class="btn"
            disabled=${action.busy}
            title=${webhook.enabled ? 'New events are not sent, and deliveries that are pending wait.' : ''}
            onClick=${() => setEnabled(!webhook.enabled)}
          >
            ${webhook.enabled ? 'Disable' : 'Enable'}
          </button>
          <button type="button" class="btn" onClick=${() => setOpenDialog('rotate')}>Rotate the secret …</button>
          <button type="button" class="btn danger" onClick=${() => setOpenDialog('delete')}>Delete …</button>
        </div>`}
      </div>
      <${ErrorText} error=${action.error} />
      ${webhook.last_error && html`<p class="warning">Last attempt: ${webhook.last_error}</p>`}
      ${openDialog === 'edit' && html`<${EditDialog}
        webhook=${webhook}
        onClose=${() => setOpenDialog(null)}
        onSaved=${() => {
          setOpenDialog(null);
          resource.reload();
        }}
      />`}
      ${openDialog === 'rotate' && html`<${FormDialog}
        title="Rotate the secret?"
        verb="Rotate"
        onClose=${() => setOpenDialog(null)}
        onSubmit=${async () => {
          setSecret((await post(`${path}/rotate`)).secret);
          setOpenDialog(null);
        }}
      >
        <p>Messages get a new secret. For 24 hours they are signed with the present one too.</p>
      <//>`}
      ${secret && html`<${SecretDialog} secret=${secret} onClose=${() => setSecret(null)} />`}
      ${openDialog === 'delete' && html`<${DeleteDialog}
        what="webhook"
        path=${path}
        nextPage="/webhooks"
        onClose=${() => setOpenDialog(null)}
      >
        ${webhook.name} is deleted with its deliveries, and those that wait are not sent.
      <//>`}
      <${Loaded} resource=${deliveries} what="deliveries">
        ${(/** @type {api.Page<api.Delivery>} */ page) => html`
          <section class="box scroll" tabindex="0" role="region" aria-label="Deliveries">
            <header>
              <h2>Deliveries</h2>
              <span class="grow"></span>
              <${Choice}
                label="Status of deliveries"
                value=${status}
                options=${DELIVERY_STATUSES}
                onChange=${(/** @type {string} */ value) => setQuery({ status: value, after: null })}
              />
            </header>
            ${page.data.length === 0
              ? status
                ? html`<${Empty} title="No delivery has this status." />`
                : html`<${Empty} title="There are no deliveries yet."><p class="muted">Send a test to see one.</p><//>`
              : html`<table class="table">
                  <thead>
                    <tr>
                      <th>Event</th>
                      <th>Status</th>
                      <th class="right hide-s">Attempts</th>
                      <th class="hide-s">Result</th>
                      <th class="right">Action</th>
                    </tr>
                  </thead>
                  <tbody>
                    ${page.data.map(
                      (delivery) => html`<${DeliveryRow}
                        key=${delivery.id}
                        delivery=${delivery}
                        now=${now}
                        onRedeliver=${() => send(`deliveries/${delivery.id}/redeliver`)}
                      />`,
                    )}
                  </tbody>
                </table>`}
          </section>
          <${PageButtons} after=${after} page=${page} />
        `}
      <//>
    `}
  <//>`;
}

/** @param {api.Delivery} delivery */
const describeResult = (delivery) =>
  delivery.error ?? (delivery.response_status ? `status ${delivery.response_status}` : '–');

/** @param {{ delivery: api.Delivery, now: number, onRedeliver: () => void }} props */
const DeliveryRow = ({ delivery, now, onRedeliver }) => html`<tr>
  <td>
    ${delivery.run_id
      ? html`<a class="name" href=${`/runs/${delivery.run_id}`}>
          ${delivery.type} of ${format.shortId(delivery.run_id)}
        </a>`
      : html`<span class="name">${delivery.type}</span>`}
    <div class="sub" title=${delivery.created_at}>${format.ago(delivery.created_at, now)}</div>
    <div class="sub when-s">${describeResult(delivery)}</div>
  </td>
  <td><span class=${delivery.status === 'failed' ? 'tag warn' : 'tag'}>${delivery.status}</span></td>
  <td class="right num hide-s">${format.integer(delivery.attempts)}</td>
  <td class="hide-s">
    ${describeResult(delivery)}
    ${delivery.status === 'pending' && delivery.error && html`<div class="sub">
      next attempt ${format.clock(delivery.next_attempt_at)}
    </div>`}
  </td>
  <td class="right">
    ${hasScope('write') && html`<button type="button" class="btn small" onClick=${onRedeliver}>Send again</button>`}
  </td>
</tr>`;

/** @param {{ secret: string, onClose: () => void }} props */
const SecretDialog = ({ secret, onClose }) => html`<${Dialog} title="Secret of the webhook" onClose=${onClose}>
  <p>The receiver verifies messages with this secret. Store it now: it cannot be shown again.</p>
  <p><${Copy} text=${secret} label="Copy the secret" /></p>
  <footer><button type="button" class="btn primary" onClick=${onClose}>It is stored</button></footer>
<//>`;

/** @param {{ webhook?: api.Webhook, onClose: () => void, onSaved: (webhook: api.Webhook) => void }} props */
function EditDialog({ webhook, onClose, onSaved }) {
  const [url, setUrl] = useState(webhook?.url ?? '');
  const [name, setName] = useState(webhook?.name ?? '');
  const [messageFormat, setMessageFormat] = useState(webhook?.format ?? 'standard');
  const [types, setTypes] = useState(webhook?.types ?? ['end']);
  const [conditions, setConditions] = useState(webhook?.filter ?? {});
  const typesOfFormat = messageFormat === 'openai' ? JOB_TYPES : TYPES;
  const changeFormat = (/** @type {any} */ value) => {
    setMessageFormat(value);
    // The types of the former format would be refused.
    if ((value === 'openai') !== (messageFormat === 'openai')) {
      setTypes(value === 'openai' ? Object.keys(JOB_TYPES) : ['end']);
    }
  };
  const saveWebhook = async () => {
    const filter = Object.fromEntries(
      Object.entries(conditions)
        .map(([field, value]) => [field, typeof value === 'string' ? value.trim() : value])
        .filter(([, value]) => value?.length),
    );
    const body = { url: url.trim(), name: name.trim() || null, format: messageFormat, types, filter };
    if (!webhook) return onSaved(await post('/v1/webhooks', body));
    const isChanged = (/** @type {[string, any]} */ [field, value]) =>
      JSON.stringify(value) !== JSON.stringify(webhook[/** @type {keyof api.Webhook} */ (field)]);
    const changes = Object.fromEntries(Object.entries(body).filter(isChanged));
    return onSaved(await sendRequest('PATCH', `/v1/webhooks/${webhook.id}`, { body: changes }));
  };
  return html`<${FormDialog}
    title=${webhook ? 'Edit the webhook' : 'New webhook'}
    verb=${webhook ? 'Save' : 'Create'}
    labels=${{ url: 'Address', name: 'Name' }}
    onClose=${onClose}
    onSubmit=${saveWebhook}
  >
    <div class="f">
      <label for="webhook-url">Address</label>
      <input
        id="webhook-url"
        type="url"
        required
        maxlength="2000"
        value=${url}
        onInput=${(/** @type {any} */ event) => setUrl(event.target.value)}
      />
      <p class="hint">A public address with HTTPS.</p>
    </div>
    <div class="f">
      <label for="webhook-name">Name</label>
      <input
        id="webhook-name"
        type="text"
        required=${webhook !== undefined}
        maxlength="200"
        placeholder="the host of its address"
        value=${name}
        onInput=${(/** @type {any} */ event) => setName(event.target.value)}
      />
    </div>
    <div class="f"><${Choice} label="Format" value=${messageFormat} options=${FORMATS} onChange=${changeFormat} /></div>
    <p class="legend-text"><b>Events</b></p>
    <div class="row wrap" role="group" aria-label="Events">
      ${Object.entries(typesOfFormat).map(
        ([type, text]) => html`<label class="check">
          <input type="checkbox" checked=${types.includes(type)} onChange=${() => setTypes(toggle(types, type))} />
          ${text}
        </label>`,
      )}
    </div>
    <${Conditions} conditions=${conditions} onChange=${setConditions} />
  <//>`;
}

/**
 * Conditions on the run of an event.
 * @param {{ conditions: api.Webhook['filter'], onChange: (conditions: api.Webhook['filter']) => void }} props
 */
function Conditions({ conditions, onChange }) {
  const experiments = useResource((signal) => get('/v1/experiments', { limit: 200 }, signal), 'experiments');
  const setFromEvent = (/** @type {string} */ name) => (/** @type {any} */ event) =>
    onChange({ ...conditions, [name]: event.target.value });
  const statuses = conditions.status ?? [];
  return html`
    <p class="legend-text">
      <b>Runs</b> <span class="hint">All conditions must hold; without any, every run counts.</span>
    </p>
    <div class="f">
      <label for="webhook-experiment">Experiment</label>
      <select id="webhook-experiment" value=${conditions.experiment_id ?? ''} onChange=${setFromEvent('experiment_id')}>
        <option value="">All experiments</option>
        ${(experiments.data?.data ?? []).map(
          (/** @type {any} */ experiment) => html`<option value=${experiment.id}>${experiment.name}</option>`,
        )}
      </select>
    </div>
    <div class="f">
      <label for="webhook-task">Task</label>
      <select id="webhook-task" value=${conditions.task ?? ''} onChange=${setFromEvent('task')}>
        ${TASKS.map(([task, text]) => html`<option value=${task}>${text}</option>`)}
      </select>
    </div>
    ${[
      ['base_model', 'Base model'],
      ['tag', 'Tag'],
    ].map(
      ([condition, label]) => html`<div class="f" key=${condition}>
        <label for=${`webhook-${condition}`}>${label}</label>
        <input
          id=${`webhook-${condition}`}
          type="text"
          maxlength=${condition === 'tag' ? 200 : 300}
          value=${conditions[condition] ?? ''}
          onInput=${setFromEvent(condition)}
        />
      </div>`,
    )}
    <div class="row wrap" role="group" aria-label="Statuses that an event reports">
      ${STATUSES.map(
        (status) => html`<label class="check">
          <input
            type="checkbox"
            checked=${statuses.includes(status)}
            onChange=${() => onChange({ ...conditions, status: toggle(statuses, status) })}
          />
          ${labelStatus(status)}
        </label>`,
      )}
    </div>
  `;
}

/**
 * @param {string[]} values
 * @param {string} value
 */
const toggle = (values, value) =>
  values.includes(value) ? values.filter((other) => other !== value) : [...values, value];
