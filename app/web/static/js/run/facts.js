// What computes a run, from the facts that its trainer reported. Pure: no access to the page.

import * as format from '../format.js';

/** @import * as api from '../api_types.js' */

const GIB = 2 ** 30;
const KERNEL_PARTS = /** @type {const} */ ([
  ['norms', 'norms'],
  ['lora', 'adapters'],
  ['dropout', 'dropout'],
  ['head', 'loss head'],
]);

/**
 * Facts that explain memory and speed of a run, as pairs of name and value; empty before the trainer has reported any.
 * @param {api.Run} run
 * @returns {[string, string][]}
 */
export function collectFacts(run) {
  const facts = run.facts ?? {};
  const attention = facts.kernels?.attention ?? facts.attention;
  const kernels = [['attention', attention], ...KERNEL_PARTS.map(([key, part]) => [part, facts.kernels?.[key]])];
  const total = facts.parameters_total;
  /** @type {[string, string | null | undefined | false][]} */
  const pairs = [
    ['Device', facts.device_name ?? facts.device],
    [
      'Kernels',
      kernels
        .filter(([, kernel]) => kernel)
        .map((pair) => pair.join(' '))
        .join(', '),
    ],
    ['Precision', describePrecision(run.effective_config ?? {})],
    ['Parameters', total > 0 && `${format.integer(facts.parameters_trainable)} of ${format.integer(total)} trained`],
    ['Planned step', facts.step_plan && describePlannedStep(facts.step_plan)],
    [
      'Compilation',
      facts.compile_seconds != null && `${format.significant(facts.compile_seconds)} s before the first step`,
    ],
  ];
  return /** @type {[string, string][]} */ (pairs.filter(([, value]) => value));
}

/** @param {any} effective */
function describePrecision({ dtype, load_in_4bit, load_in_8bit, bnb_4bit_quant_type, lora_r, weights_dtype }) {
  if (dtype == null) return null;
  const base = load_in_4bit
    ? `base in 4 bits (${bnb_4bit_quant_type})`
    : load_in_8bit
      ? 'base in 8 bits'
      : lora_r != null
        ? `base in ${dtype}`
        : `weights in ${weights_dtype}`;
  return `computes in ${dtype}, ${base}`;
}

/** @param {any} plan */
function describePlannedStep(plan) {
  const usable = `${(plan.usable_bytes / GIB).toFixed(1)} GiB`;
  return [
    describeStep(plan.batch_size, plan.gradient_accumulation_steps),
    `${plan.recomputed_layers} of ${plan.layers} layers recomputed`,
    plan.needed_bytes == null
      ? `measured peak above ${usable}`
      : `measured peak ${(plan.needed_bytes / GIB).toFixed(1)} of ${usable}`,
    plan.step_seconds != null && `${format.significant(plan.step_seconds)} s`,
    !plan.fits && 'may run out of memory',
  ]
    .filter(Boolean)
    .join(', ');
}

/**
 * The planned step, and then its alternatives with other micro-batches.
 * @param {any} plan
 * @returns {{ step: string, recomputed: number, peak: string, seconds: string, source: string }[]}
 */
export function describePlans(plan) {
  if (!plan) return [];
  const rows = plan.batch_size * plan.gradient_accumulation_steps;
  const chosenPlan = {
    rows: plan.batch_size,
    recomputed: plan.recomputed_layers,
    needed_bytes: plan.needed_bytes,
    step_seconds: plan.step_seconds,
  };
  return [chosenPlan, ...plan.alternatives].map((candidate, index) => ({
    step: describeStep(candidate.rows, rows / candidate.rows),
    recomputed: candidate.recomputed,
    peak: candidate.needed_bytes == null ? '–' : (candidate.needed_bytes / GIB).toFixed(1),
    seconds: format.significant(candidate.step_seconds),
    source: index === 0 ? 'chosen, measured' : 'predicted',
  }));
}

/** @param {number} rows @param {number} microBatches */
function describeStep(rows, microBatches) {
  const noun = microBatches === 1 ? 'micro-batch' : 'micro-batches';
  return `${format.counted(rows, 'row')} × ${format.integer(microBatches)} ${noun}`;
}
