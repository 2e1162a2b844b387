// Webhooks: addresses to which events are sent, and the deliveries of each.

import { html, useState } from '../../vendor/preact.js';
import { get, post } from '../api.js';
import { Choice, Copy, Dialog } from '../components/controls.js';
import { DeleteDialog, FormDialog } from '../components/dialogs.js';
import { Icon } from '../components/icon.js';
import { PageButtons } from '../components/pages.js';
import { Empty, ErrorText, Loaded } from '../components/states.js';
import * as format from '../format.js';
import { useAction, useNow, useResource } from '../resource.js';
import { query, useNavigation } from '../router.js';
import { hasScope } from '../session.js';

/** @import * as api from '../api_types.js' */

export const title = 'Webhooks';

const EVERY_MS = 3000;
/** @type {Record<string, string>} Words for the types of events. */
const TYPES = { end: 'Ends of runs', status: 'Status changes', progress: 'Progress' };
/** @type {[string, string][]} */
const FORMATS = [
  ['standard', 'Signed JSON'],
  ['slack', 'Slack, Mattermost'],
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
    ${isNew && html`<${NewDialog}
      onClose=${() => setNew(false)}
      onCreated=${(/** @type {api.Webhook} */ webhook) => {
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
                <p class="muted">A webhook tells a program, or a channel of Slack or Mattermost, when a run ends.</p>
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
    webhook.types.map((type) => TYPES[type] ?? type).join(', '),
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
  const deliveries = useResource((signal) => get(`${path}/deliveries`, { after }, signal), `${id} ${after}`, {
    everyMs: EVERY_MS,
  });
  const [openDialog, setOpenDialog] = useState(/** @type {'rotate' | 'delete' | null} */ (null));
  const [secret, setSecret] = useState(/** @type {string | null} */ (null));
  const action = useAction();
  const now = useNow(1000);
  const send = (/** @type {string} */ what) =>
    action.run(async () => {
      await post(`${path}/${what}`);
      deliveries.reload();
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
          <button type="button" class="btn primary" disabled=${action.busy} onClick=${() => send('test')}>
            Send a test
          </button>
          <button type="button" class="btn" onClick=${() => setOpenDialog('rotate')}>Rotate the secret …</button>
          <button type="button" class="btn danger" onClick=${() => setOpenDialog('delete')}>Delete …</button>
        </div>`}
      </div>
      <${ErrorText} error=${action.error} />
      ${webhook.last_error && html`<p class="warning">Last attempt: ${webhook.last_error}</p>`}
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
            <header><h2>Deliveries</h2></header>
            ${page.data.length === 0
              ? html`<${Empty} title="There are no deliveries yet."><p class="muted">Send a test to see one.</p><//>`
              : html`<table class="table">
                  <thead>
                    <tr>
                      <th>Event</th>
                      <th>Status</th>
                      <th class="right">Attempts</th>
                      <th>Result</th>
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

/** @param {{ delivery: api.Delivery, now: number, onRedeliver: () => void }} props */
const DeliveryRow = ({ delivery, now, onRedeliver }) => html`<tr>
  <td>
    ${delivery.run_id
      ? html`<a class="name" href=${`/runs/${delivery.run_id}`}>
          ${delivery.type} of ${format.shortId(delivery.run_id)}
        </a>`
      : html`<span class="name">${delivery.type}</span>`}
    <div class="sub" title=${delivery.created_at}>${format.ago(delivery.created_at, now)}</div>
  </td>
  <td><span class=${delivery.status === 'failed' ? 'tag warn' : 'tag'}>${delivery.status}</span></td>
  <td class="right num">${format.integer(delivery.attempts)}</td>
  <td>
    ${delivery.error ?? (delivery.response_status ? `status ${delivery.response_status}` : '–')}
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

/** @param {{ onClose: () => void, onCreated: (webhook: api.Webhook) => void }} props */
function NewDialog({ onClose, onCreated }) {
  const [url, setUrl] = useState('');
  const [messageFormat, setMessageFormat] = useState('standard');
  const [types, setTypes] = useState(['end']);
  const toggleType = (/** @type {string} */ type) =>
    setTypes(types.includes(type) ? types.filter((other) => other !== type) : [...types, type]);
  return html`<${FormDialog}
    title="New webhook"
    verb="Create"
    onClose=${onClose}
    onSubmit=${async () => onCreated(await post('/v1/webhooks', { url: url.trim(), format: messageFormat, types }))}
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
      <p class="hint">A public address with HTTPS. The command line can restrict it to some runs.</p>
    </div>
    <div class="f">
      <${Choice} label="Format" value=${messageFormat} options=${FORMATS} onChange=${setMessageFormat} />
    </div>
    <div class="f">
      ${Object.entries(TYPES).map(
        ([type, text]) => html`<label class="row">
          <input type="checkbox" checked=${types.includes(type)} onChange=${() => toggleType(type)} />
          ${text}
        </label>`,
      )}
    </div>
  <//>`;
}
