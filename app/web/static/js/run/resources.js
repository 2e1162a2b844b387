// Resources of a run in plain words. Pure: no access to the page.

import * as format from '../format.js';

/** @import * as api from '../api_types.js' */

const NOUNS = { cuda: 'GPU', cpu: 'CPU device' };

/**
 * Devices of a run, and what else it asks of them.
 * @param {api.Run} run
 * @returns {{ devices: string, conditions: string[] }}
 */
export function describeResources({ resources: requested, requirements: required }) {
  const name = requested.gpu ? ` (${requested.gpu})` : '';
  const hosts = requested.hosts > 1 ? ` on ${format.counted(requested.hosts, 'host')}` : '';
  const noun = NOUNS[/** @type {keyof typeof NOUNS} */ (required.kind)] ?? 'device';
  const conditions = [
    requested.memory_mb && `at least ${format.gib(requested.memory_mb)} GiB each`,
    required.sharded && 'model divided among them',
    required.sequence_parallel > 1 && `${required.sequence_parallel} share each sequence`,
    required.expert_parallel > 1 && `${required.expert_parallel} share the experts`,
    requested.labels.length > 0 && `${requested.labels.length > 1 ? 'labels' : 'label'} ${requested.labels.join(', ')}`,
  ];
  return {
    devices: `${format.counted(requested.devices, noun)}${name}${hosts}`,
    conditions: conditions.filter((condition) => typeof condition === 'string'),
  };
}
