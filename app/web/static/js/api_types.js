// What the dashboard reads of the API's responses and events, as types: no module loads this one. Every field is
// described in docs/reference/http.md and docs/reference/events.md. Times are texts of RFC 3339.

/**
 * @typedef {'pending' | 'initializing' | 'running' | 'checkpointing' | 'completed' | 'failed' | 'cancelled'} RunStatus
 */
/** @typedef {'checkpoint' | 'epoch_end' | 'best' | 'discard'} StopMode */

/**
 * Page of a list.
 * @template T
 * @typedef {{ data: T[], has_more: boolean }} Page
 */

/**
 * Devices that a run requests.
 * @typedef {object} Resources
 * @property {'cpu' | 'cuda' | null} kind
 * @property {string | null} gpu Words of the device's name.
 * @property {number | null} memory_mb Least memory of each device.
 * @property {number} devices In all.
 * @property {number} hosts
 * @property {string[]} labels
 */

/**
 * What a run needs of its devices, as the service decided it.
 * @typedef {object} Requirements
 * @property {'cpu' | 'cuda' | null} kind
 * @property {boolean} [sharded] True if the model is divided among the devices.
 * @property {number} sequence_parallel
 * @property {number} expert_parallel
 */

/** @typedef {{ paused_at: string, paused_by: string, reason: string | null }} Pause */
/**
 * Usage of devices by a key.
 * @typedef {object} UsageRow
 * @property {string | null} group Id of the key.
 * @property {string | null} name
 * @property {number} device_hours
 * @property {{ amount: number, currency: string } | null} cost
 */

/** @typedef {{ start_at: string | null, finish_at: string | null, confidence: string, basis: string }} Prediction */

/**
 * Run, as `GET /v1/runs/{id}` returns it.
 * @typedef {object} Run
 * @property {string} id
 * @property {string} name
 * @property {RunStatus} status
 * @property {'train' | 'evaluate' | 'export' | 'predict' | 'serve'} task
 * @property {string[]} tags
 * @property {boolean} pinned
 * @property {string} backend
 * @property {string} experiment_id
 * @property {string | null} dataset_id Null only for a serving run.
 * @property {string | null} eval_dataset_id
 * @property {Record<string, string>} extra_eval_datasets
 * @property {string | null} parent_run_id Run that it resumes, or whose checkpoint it uses.
 * @property {string | null} base_run_id Run whose output is its base model.
 * @property {Record<string, any>} config Requested configuration, with defaults.
 * @property {Record<string, any> | null} effective_config Configuration in effect; null before the first attempt.
 * @property {Record<string, any> | null} facts What its trainer reported.
 * @property {Resources} resources
 * @property {Requirements} requirements
 * @property {number} priority
 * @property {number} max_restarts
 * @property {number} attempt Attempts so far.
 * @property {number} current_step
 * @property {number} current_epoch
 * @property {number | null} total_steps
 * @property {number | null} best_loss
 * @property {number | null} best_eval
 * @property {{ code: string, message: string } | null} pending_reason Why it cannot start now.
 * @property {Prediction | null} prediction
 * @property {string | null} end_reason
 * @property {string | null} error_code
 * @property {string | null} error_message
 * @property {string | null} fine_tuned_model Its output.
 * @property {StopMode | null} stop_mode
 * @property {string | null} stop_requested_at
 * @property {number} last_seq `seq` of its newest event.
 * @property {Record<string, any> | null} estimate
 * @property {Record<string, any> | null} measured
 * @property {string} created_at
 * @property {string | null} started_at
 * @property {string | null} finished_at
 */

/**
 * Run in a list of the view `row`.
 * @typedef {object} RunRow
 * @property {string} id
 * @property {string} name
 * @property {RunStatus} status
 * @property {'train' | 'evaluate' | 'export' | 'predict' | 'serve'} task
 * @property {string} method
 * @property {string} base_model
 * @property {string} experiment_id
 * @property {string[]} tags
 * @property {number} step
 * @property {number | null} total_steps
 * @property {number | null} learning_rate
 * @property {number | null} best_loss
 * @property {number | null} best_eval
 * @property {number | null} tokens_per_second
 * @property {(number | null)[]} losses Some points of the curve.
 * @property {(number | null)[]} rewards
 * @property {string | null} reason Code of the reason why it waits or failed.
 * @property {string | null} end_reason
 * @property {string | null} worker
 * @property {string | null} by Key that created it.
 * @property {string} created_at
 * @property {string | null} started_at
 * @property {string | null} finished_at
 * @property {string | null} starts_at Predicted.
 * @property {string | null} finishes_at Predicted.
 */

/**
 * @typedef {object} Checkpoint
 * @property {string} id
 * @property {number} step
 * @property {number} epoch
 * @property {'periodic' | 'stop' | 'best' | 'final'} kind
 * @property {number} bytes
 * @property {Record<string, number | null>} metrics
 * @property {boolean} is_best
 * @property {boolean} pinned
 * @property {number | null} save_seconds
 * @property {string | null} bad_reason Why it cannot be used.
 * @property {('local' | 'remote')[]} copies
 * @property {string} created_at
 */

/**
 * @typedef {object} Attempt
 * @property {number} attempt Number, from 1.
 * @property {string | null} worker Host.
 * @property {number | null} start_step
 * @property {string} started_at
 * @property {string | null} ended_at
 * @property {string | null} outcome
 */

/**
 * Live action on a run.
 * @typedef {object} Action
 * @property {string} id
 * @property {'checkpoint' | 'evaluate' | 'sample' | 'set_learning_rate' | 'extend'} action
 * @property {'waiting' | 'done' | 'refused' | 'failed'} status
 * @property {number | null} step Step after which it took effect.
 * @property {Record<string, unknown> | null} result
 * @property {string | null} message
 * @property {string} created_at
 * @property {string | null} finished_at
 */

/**
 * Metrics of training at a step; null for a value that was not finite, or that there is not.
 * @typedef {object} MetricRecord
 * @property {number} step
 * @property {number | null} [epoch]
 * @property {number | null} [loss]
 * @property {number | null} [learning_rate]
 * @property {number | null} [grad_norm]
 * @property {number | null} [gpu_memory_mb]
 * @property {number | null} [samples_per_second]
 * @property {Record<string, unknown>} [extra]
 * @property {string[]} [non_finite] Dotted names of the values that were not finite.
 */

/**
 * Default of the configuration that the device cannot honor.
 * @typedef {{ field: string, requested: unknown, used: unknown, reason: string }} Replacement
 */

/**
 * Fields of every event. `seq` is its position in the log of the run.
 * @typedef {{ seq: number, ts?: string | null }} EventFields
 */

/** @typedef {EventFields & MetricRecord & { type: 'metric' }} MetricEvent */
/** @typedef {EventFields & { type: 'eval', step: number, metrics?: Record<string, unknown> }} EvalEvent */
/**
 * @typedef {EventFields & {
 *   type: 'log', line: string, stream: string, level: string, ts: string | null,
 * }} LogEvent
 */
/**
 * @typedef {EventFields & {
 *   type: 'sample', step: number, prompt: string, completion: string, rewards?: Record<string, number | null> | null,
 * }} SampleEvent
 */
/**
 * @typedef {EventFields & {
 *   type: 'status', from: RunStatus | null, to: RunStatus, reason: string | null,
 * }} StatusEvent
 */
/** @typedef {EventFields & { type: 'pending', code: string, message: string }} PendingEvent */
/**
 * @typedef {EventFields & {
 *   type: 'config', effective: Record<string, any>, replaced: Replacement[], facts: Record<string, any>,
 * }} ConfigEvent
 */
/**
 * @typedef {EventFields & {
 *   type: 'progress', phase: string, done: number | null, total: number | null, message: string | null,
 * }} ProgressEvent
 */
/** @typedef {EventFields & { type: 'checkpoint', step: number, kind: string, bytes: number | null }} CheckpointEvent */
/** @typedef {EventFields & { type: 'skipped_rows', reason: string }} SkippedRowsEvent */
/** @typedef {EventFields & { type: 'export', weights: string, step: number, reason: string }} ExportEvent */
/**
 * @typedef {EventFields & {
 *   type: 'action', action: string, step: number, status: string, message: string | null,
 * }} ActionEvent
 */
/** @typedef {EventFields & { type: 'repair', reason: string }} RepairEvent */
/** @typedef {EventFields & Telemetry & { type: 'device', index: number }} DeviceEvent */
/** @typedef {EventFields & { type: 'error', code: string, message: string }} ErrorEvent */
/** @typedef {EventFields & { type: 'end', status: RunStatus }} EndEvent */

/**
 * Event of a run, told apart by `type`.
 * @typedef {MetricEvent | EvalEvent | LogEvent | SampleEvent | StatusEvent | PendingEvent | ConfigEvent | ProgressEvent
 *   | CheckpointEvent | SkippedRowsEvent | ExportEvent | ActionEvent | RepairEvent | DeviceEvent | ErrorEvent
 *   | EndEvent} RunEvent
 */

/**
 * State of a device while something runs on it.
 * @typedef {object} Telemetry
 * @property {number | null} utilization_percent
 * @property {number | null} memory_mb
 * @property {number | null} temperature_celsius
 * @property {number | null} power_watts
 */

/**
 * @typedef {object} WorkerDevice
 * @property {number} index
 * @property {'cpu' | 'cuda'} kind
 * @property {string} name
 * @property {number | null} memory_mb
 * @property {string | null} run_id Run that has it.
 * @property {string | null} paused_until
 * @property {string | null} trouble Why it is paused.
 * @property {Telemetry | null} telemetry
 */

/**
 * @typedef {object} Worker
 * @property {string} id
 * @property {string} host
 * @property {string} version
 * @property {'online' | 'draining' | 'offline'} state
 * @property {string[]} labels
 * @property {'zygote' | 'cold'} launch_mode
 * @property {string} launch_reason
 * @property {string} heartbeat_at
 * @property {WorkerDevice[]} devices
 */

/**
 * Dataset in a list.
 * @typedef {object} Dataset
 * @property {string} id
 * @property {string} name
 * @property {string} format
 * @property {number} rows
 * @property {number} bytes
 * @property {string} sha256
 * @property {string[]} columns
 * @property {string} created_at
 */

export {};

/**
 * Webhook, as `GET /v1/webhooks/{id}` returns it.
 * @typedef {object} Webhook
 * @property {string} id
 * @property {string} name
 * @property {string} url
 * @property {'standard' | 'slack' | 'openai'} format
 * @property {string[]} types
 * @property {{ tag?: string, status?: string[], [name: string]: any }} filter
 * @property {boolean} enabled
 * @property {string | null} failing_since
 * @property {string | null} last_error
 * @property {string} created_at
 * @property {string} [secret] Only in the responses that create it.
 */

/**
 * Delivery of an event to a webhook.
 * @typedef {object} Delivery
 * @property {string} id
 * @property {string} type
 * @property {string | null} run_id
 * @property {'pending' | 'delivered' | 'failed'} status
 * @property {number} attempts
 * @property {number | null} response_status
 * @property {string | null} error
 * @property {string | null} next_attempt_at
 * @property {string} created_at
 */
