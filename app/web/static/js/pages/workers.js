// Workers, their devices, and what runs on them.

import { html } from '../../vendor/preact.js';
import { get } from '../api.js';
import { Chip } from '../components/controls.js';
import { Empty, Loaded, Prose } from '../components/states.js';
import * as format from '../format.js';
import { useNow, useResource } from '../resource.js';

/** @import * as api from '../api_types.js' */

export const title = 'Workers';

const EVERY_MS = 5000;
const USAGE_EVERY_MS = 60_000;

export default function Workers() {
  const workers = useResource((signal) => get('/v1/workers', { limit: 200 }, signal), 'workers', { everyMs: EVERY_MS });
  const active = useResource(
    (signal) =>
      get('/v1/runs', { status: ['initializing', 'running', 'checkpointing'], view: 'row', limit: 200 }, signal),
    'active',
    { everyMs: EVERY_MS },
  );
  const counts = useResource((signal) => get('/v1/runs/counts', {}, signal), 'counts', { everyMs: EVERY_MS });
  const now = useNow(1000);
  const runs = new Map((active.data?.data ?? []).map((/** @type {api.RunRow} */ run) => [run.id, run]));
  return html`
    <div class="head center">
      <h1 class="grow">Workers</h1>
      ${workers.data && html`<span class="sub num">
        ${summarize(workers.data.data, counts.data?.counts.pending ?? 0)}
      </span>`}
    </div>
    <${Loaded} resource=${workers} what="workers">
      ${(/** @type {api.Page<api.Worker>} */ page) => {
        const shownWorkers = page.data.filter((worker) => worker.state !== 'offline');
        if (shownWorkers.length === 0) {
          return html`<section class="box summary">
            <${Empty} title="No worker is online.">
              <p class="muted">
                Start one with <code>anneal worker</code> on a machine that shares database, Redis and storage, or
                restart <code>anneal up</code>.
              </p>
            <//>
          </section>`;
        }
        return html`<div class="hosts">
          ${shownWorkers.map(
            (worker) => html`<${WorkerCard} key=${worker.id} worker=${worker} runs=${runs} now=${now} />`,
          )}
        </div>`;
      }}
    <//>
    <${UsageOfMonth} />
  `;
}

/** Device-hours of the present month by key. */
function UsageOfMonth() {
  const firstDay = `${new Date().toISOString().slice(0, 7)}-01`;
  const usage = useResource((signal) => get('/v1/usage', { by: 'key', from: firstDay }, signal), firstDay, {
    everyMs: USAGE_EVERY_MS,
  });
  /** @type {api.UsageRow[]} */
  const rows = usage.data?.data ?? [];
  if (rows.length === 0) return null;
  return html`<section class="box" aria-label="Usage of this month">
    <header><h2>Usage of this month</h2></header>
    <table class="table">
      <thead>
        <tr><th>Key</th><th class="right">Device-hours</th><th class="right">Cost</th></tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) => html`<tr key=${row.group}>
            <td class="clip">${row.name ?? row.group ?? 'The service'}</td>
            <td class="right num">${row.device_hours.toFixed(2)}</td>
            <td class="right num">${row.cost ? `${row.cost.amount.toFixed(2)} ${row.cost.currency}` : '–'}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </section>`;
}

/** @param {api.Worker[]} workers @param {number} pending */
export function summarize(workers, pending) {
  const online = workers.filter((worker) => worker.state === 'online');
  const devices = online.flatMap((worker) => worker.devices);
  const busy = devices.filter((device) => device.run_id).length;
  return [
    `${format.counted(online.length, 'worker')} online`,
    `${busy} of ${format.counted(devices.length, 'device')} busy`,
    `${format.counted(pending, 'run')} pending`,
  ].join(' · ');
}

/** @param {{ worker: api.Worker, runs: Map<string | null, api.RunRow>, now: number }} props */
const WorkerCard = ({ worker, runs, now }) => html`<section
  class="box"
  aria-label=${`Worker ${worker.host}, ${format.shortId(worker.id)}`}
>
  <header>
    <h2 class="clip">${worker.host}</h2>
    <span class=${worker.state === 'online' ? 'tag' : 'tag warn'}>${worker.state}</span>
    ${worker.labels.map((label) => html`<span class="tag">${label}</span>`)}
    <span class="grow"></span>
    <span class="sub nowrap">${worker.version} · heartbeat ${format.ago(worker.heartbeat_at, now)}</span>
  </header>
  <ul class="list">
    ${worker.devices.map(
      (device) => html`<${DeviceRow} key=${device.index} device=${device} run=${runs.get(device.run_id)} />`,
    )}
  </ul>
  ${worker.launch_mode === 'cold' && worker.launch_reason && html`<p class="sub warning">
    Training processes start cold: <${Prose} text=${worker.launch_reason} />
  </p>`}
</section>`;

/** @param {{ device: api.WorkerDevice, run: api.RunRow | undefined }} props */
function DeviceRow({ device, run }) {
  const telemetry = device.telemetry;
  const usedMb = telemetry?.memory_mb;
  const share = usedMb != null && device.memory_mb ? usedMb / device.memory_mb : null;
  const facts =
    telemetry &&
    [
      telemetry.utilization_percent != null && `${Math.round(telemetry.utilization_percent)} % busy`,
      telemetry.temperature_celsius != null && `${telemetry.temperature_celsius} °C`,
      telemetry.power_watts != null && `${Math.round(telemetry.power_watts)} W`,
    ]
      .filter(Boolean)
      .join(' · ');
  return html`<li class="device">
    <div class="grow">
      <div class="row">
        <span class="name grow clip">${device.name}</span>
        <span class="num muted nowrap">
          ${usedMb != null ? `${format.gib(usedMb)} of ` : ''}
          ${format.gib(device.memory_mb)} GiB
        </span>
      </div>
      ${share != null && html`<div
        class="bar"
        role="meter"
        aria-label=${`Memory of ${device.name}`}
        aria-valuenow=${Math.round(100 * share)}
        aria-valuemin="0"
        aria-valuemax="100"
      >
        <i style=${{ width: `${100 * share}%` }}></i>
      </div>`}
      ${facts && html`<div class="sub num">${facts}</div>`}
      ${device.run_id
        ? html`<div class="row">
            <a class="name clip" href=${`/runs/${device.run_id}`}>${run?.name ?? format.shortId(device.run_id)}</a>
            ${run && html`<${Chip} status=${run.status} />`}
            ${run?.total_steps && html`<span class="sub num nowrap">
              ${format.percent(run.step ?? 0, run.total_steps)}
            </span>`}
          </div>`
        : device.paused_until
          ? html`<div class="sub warning">
              Paused until ${format.clock(device.paused_until)}: <${Prose} text=${device.trouble ?? ''} />
            </div>`
          : html`<div class="muted">Free</div>`}
    </div>
  </li>`;
}
