// The form of a new run: its fields from the schema of the configuration, and the request that it describes. Pure.

/**
 * @typedef {object} FormField
 * @property {string} name
 * @property {'number' | 'integer' | 'amount' | 'boolean' | 'choice' | 'text' | 'list' | 'json'} kind `amount`: a number or a word such as
 *   `1k` or `epoch`.
 * @property {string} description
 * @property {unknown} fallback Default.
 * @property {boolean} isNullable
 * @property {string[]} choices
 * @property {number} [min]
 * @property {number} [max]
 */

/** @param {any} schema JSON schema of the configuration. @returns {{ group: string, fields: FormField[] }[]} */
export function groupsOf(schema) {
  return Object.entries(schema['x-groups']).map(([group, names]) => ({
    group,
    fields: /** @type {string[]} */ (names).map((name) => fieldOf(name, schema.properties[name], schema.$defs ?? {})),
  }));
}

/**
 * Fields by name, with the defaults of a method.
 * @param {any} schema @param {string} method @param {boolean} isAdapter
 * @returns {Map<string, FormField>}
 */
export function fieldsOf(schema, method, isAdapter) {
  const defaults = schema['x-method-defaults'][method]?.[isAdapter ? 'adapter' : 'full'] ?? {};
  const all = groupsOf(schema).flatMap(({ fields }) => fields);
  return new Map(
    all.map((field) => [field.name, field.name in defaults ? { ...field, fallback: defaults[field.name] } : field]),
  );
}

/**
 * Fields by name, with the defaults of the method of a configuration.
 * @param {any} schema @param {Record<string, any>} config
 */
export function fieldsFor(schema, config) {
  const method = String(config.method ?? schema.properties.method.default);
  return fieldsOf(schema, method, config.lora_r !== null);
}

/**
 * @param {string} name @param {any} property @param {Record<string, any>} definitions
 * @returns {FormField}
 */
export function fieldOf(name, property, definitions) {
  const resolve = (/** @type {any} */ one) => (one.$ref ? { ...definitions[one.$ref.split('/').pop()], ...one } : one);
  const leaves = (/** @type {any} */ one) => {
    const found = resolve(one);
    return (found.anyOf ?? found.oneOf)?.flatMap(leaves) ?? [found];
  };
  const parts = leaves(property);
  const isNullable = parts.some((/** @type {any} */ one) => one.type === 'null');
  const kinds = parts.filter((/** @type {any} */ one) => one.type !== 'null');
  const main = kinds[0] ?? {};
  const field = {
    name,
    description: property.description ?? main.description ?? '',
    fallback: 'default' in property ? property.default : defaultsOf(main),
    isNullable,
    choices: /** @type {string[]} */ ([]),
    min: main.minimum ?? main.exclusiveMinimum,
    max: main.maximum ?? main.exclusiveMaximum,
  };
  if (kinds.length === 1) {
    const choices = main.enum ?? (main.const === undefined ? null : [main.const]);
    if (choices && choices.every((/** @type {unknown} */ one) => typeof one === 'string'))
      return { ...field, kind: 'choice', choices };
    if (main.type === 'boolean') return { ...field, kind: 'boolean' };
    if (main.type === 'integer') return { ...field, kind: 'integer' };
    if (main.type === 'number') return { ...field, kind: 'number' };
    if (main.type === 'string') return { ...field, kind: 'text' };
    if (main.type === 'array' && resolve(main.items ?? {}).type === 'string') return { ...field, kind: 'list' };
  }
  const isScalar = (/** @type {any} */ one) =>
    ['integer', 'number', 'string'].includes(one.type) || typeof one.const === 'string';
  return { ...field, kind: kinds.length > 1 && kinds.every(isScalar) ? 'amount' : 'json' };
}

/**
 * Default of an object whose fields all have one; undefined for others.
 * @param {any} definition
 */
function defaultsOf(definition) {
  const fields = Object.entries(definition.properties ?? {});
  if (fields.length === 0 || !fields.every(([, one]) => 'default' in one)) return undefined;
  return Object.fromEntries(fields.map(([name, one]) => [name, one.default]));
}

/**
 * True for values that are the same, whatever the order of their fields; null and nothing at all are.
 * @param {unknown} one @param {unknown} other
 */
export function same(one, other) {
  const sorted = (/** @type {string} */ _name, /** @type {any} */ value) =>
    value !== null && typeof value === 'object' && !Array.isArray(value)
      ? Object.fromEntries(Object.entries(value).toSorted(([a], [b]) => (a < b ? -1 : 1)))
      : value;
  return JSON.stringify(one ?? null, sorted) === JSON.stringify(other ?? null, sorted);
}

/**
 * True for a value that the field has anyway.
 * @param {FormField | undefined} field @param {unknown} value
 */
export function isDefault(field, value) {
  if (field?.fallback == null) return value == null || (typeof value === 'object' && Object.keys(value).length === 0);
  return same(value, field.fallback);
}

/** Text for no value, where the default is a value. */
export const NONE = 'none';

/**
 * Text of a value in its control; empty for a field that is not set.
 * @param {FormField} field @param {unknown} value
 */
export function textOf(field, value) {
  if (value == null) return value === null && field.isNullable && field.fallback != null ? NONE : '';
  if (field.kind === 'list') return /** @type {string[]} */ (value).join('\n');
  if (field.kind === 'json') return JSON.stringify(value, null, 2);
  if (field.kind === 'number' && typeof value === 'number' && value !== 0 && Math.abs(value) < 1e-3)
    return value.toExponential().replace('e+', 'e');
  return String(value);
}

/**
 * Value of the text in a control, undefined for the default; throws `Error` with a sentence if it is none.
 * @param {FormField} field @param {string} text
 */
export function valueOf(field, text) {
  const trimmed = text.trim();
  if (trimmed === '') return undefined;
  if (trimmed === NONE && field.isNullable && field.fallback != null) return null;
  if (field.kind === 'number' || field.kind === 'integer') {
    const number = Number(trimmed);
    if (!Number.isFinite(number)) throw new Error('This is not a number.');
    if (field.kind === 'integer' && !Number.isInteger(number)) throw new Error('This must be a whole number.');
    return number;
  }
  if (field.kind === 'amount') return Number.isFinite(Number(trimmed)) ? Number(trimmed) : trimmed;
  if (field.kind === 'boolean') return trimmed === 'true';
  if (field.kind === 'list')
    return trimmed
      .split('\n')
      .map((line) => line.trim())
      .filter(Boolean);
  if (field.kind === 'json') {
    try {
      return JSON.parse(trimmed);
    } catch {
      throw new Error('This is not JSON.');
    }
  }
  return text;
}

/**
 * Body of `POST /v1/runs`: only what was set.
 * @param {Record<string, unknown>} values Fields of the request beside the configuration; null or empty ones are left out.
 * @param {Record<string, unknown>} config Fields of the configuration that were set.
 */
export function requestOf(values, config) {
  const isSet = (/** @type {[string, unknown]} */ [, value]) =>
    value != null && value !== '' && !(Array.isArray(value) && value.length === 0);
  return { ...Object.fromEntries(Object.entries(values).filter(isSet)), config };
}

/**
 * YAML of a request, for `anneal run`. Texts are quoted as in JSON, which YAML includes.
 * @param {any} value @param {number} [depth]
 * @returns {string}
 */
export function yamlOf(value, depth = 0) {
  const indent = '  '.repeat(depth);
  return Object.entries(value)
    .map(([name, one]) => {
      const isNested = one !== null && typeof one === 'object' && !Array.isArray(one) && Object.keys(one).length > 0;
      return isNested ? `${indent}${name}:\n${yamlOf(one, depth + 1)}` : `${indent}${name}: ${JSON.stringify(one)}\n`;
    })
    .join('');
}

/**
 * Command that sends a request.
 * @param {string} origin @param {unknown} body
 */
export function curlOf(origin, body) {
  // In single quotes a shell changes nothing; a quote itself is written outside of them.
  const json = JSON.stringify(body, null, 2).replaceAll("'", `'\\''`);
  return `curl -X POST ${origin}/v1/runs \\\n  -H "Authorization: Bearer $ANNEAL_API_KEY" \\\n  -H "Content-Type: application/json" \\\n  -d '${json}'`;
}
