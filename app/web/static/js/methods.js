// Methods of training as two choices, an objective and which weights are trained, and how their results are measured.
// Pure: no access to the page.

/** Objectives: name, title, data that they learn from. @type {[string, string, string][]} */
export const OBJECTIVES = [
  ['sft', 'SFT', 'Chats, completions, texts'],
  ['dpo', 'DPO', 'Preference pairs'],
  ['kto', 'KTO', 'Rated answers'],
  ['orpo', 'ORPO', 'Preference pairs, without a reference'],
  ['simpo', 'SimPO', 'Preference pairs, by mean log-probability'],
  ['reward', 'Reward', 'Model that scores answers'],
  ['rlhf', 'RLHF', 'Rewards on own completions'],
  ['gkd', 'GKD', 'Probabilities of a teacher'],
];

/** Trained weights: name, title, explanation. @type {[string, string, string][]} */
export const ADAPTERS = [
  ['qlora', 'QLoRA', 'Adapter on 4-bit weights'],
  ['lora', 'LoRA', 'Adapter on full weights'],
  ['full', 'Full', 'All weights'],
];

/** Methods of supervised training that say which weights they train. */
const WEIGHT_METHODS = new Set(ADAPTERS.map(([name]) => name));

/** True for a method whose progress shows in rewards; that of the others shows in a loss. @param {string} method */
export const isRewarded = (method) => method === 'rlhf';

/**
 * Objective and trained weights of a configuration.
 * @param {Record<string, any>} config @param {string} fallback Default method.
 */
export function readChoice(config, fallback) {
  const method = String(config.method ?? fallback);
  if (WEIGHT_METHODS.has(method)) return { objective: 'sft', adapter: method };
  const adapter =
    config.lora_r === null ? 'full' : config.load_in_4bit === false && !config.load_in_8bit ? 'lora' : 'qlora';
  return { objective: method, adapter };
}

/**
 * The configuration with another objective or other trained weights.
 * @param {Record<string, any>} config @param {string} objective @param {string} adapter
 * @returns {Record<string, any>}
 */
export function applyChoice(config, objective, adapter) {
  const { load_in_4bit: _four, load_in_8bit: _eight, lora_r: rank, ...others } = config;
  const withRank = rank == null ? others : { ...others, lora_r: rank };
  if (objective === 'sft') return { ...withRank, method: adapter };
  if (adapter === 'full') return { ...others, method: objective, lora_r: null };
  return { ...withRank, method: objective, ...(adapter === 'lora' ? { load_in_4bit: false } : {}) };
}

/**
 * Groups of runs in the order “best”, in which only runs of one group are compared.
 * @param {{ method: string, best_eval?: number | null, best_loss?: number | null }} run
 */
export function describeGroup(run) {
  if (run.best_eval != null)
    return `${run.method}, by eval ${isRewarded(run.method) ? 'reward, highest' : 'loss, lowest'} first`;
  if (run.best_loss != null) return `${run.method}, by train loss, lowest first`;
  return 'without a result, newest first';
}
