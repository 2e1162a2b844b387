// The form of a new run: its fields from the schema of the configuration, and the request that it describes. Pure.

/**
 * @typedef {object} FormField
 * @property {string} name
 * @property {'number' | 'integer' | 'amount' | 'boolean' | 'choice' | 'text' | 'list' | 'json'} kind `amount`: a number
 *   or a word, such as `1k` or `epoch`.
 * @property {string} description
 * @property {unknown} fallback Default.
 * @property {boolean} isNullable
 * @property {string[]} choices
 * @property {number} [min]
 * @property {number} [max]
 */

/** @param {any} schema JSON schema of the configuration. @returns {{ group: string, fields: FormField[] }[]} */
export function readGroups(schema) {
  return Object.entries(schema['x-groups']).map(([group, names]) => ({
    group,
    fields: /** @type {string[]} */ (names).map((name) => readField(name, schema.properties[name], schema.$defs ?? {})),
  }));
}

/**
 * Fields by name, with the defaults of a method.
 * @param {any} schema @param {string} method @param {boolean} isAdapter
 * @returns {Map<string, FormField>}
 */
export function readFields(schema, method, isAdapter) {
  const defaults = schema['x-method-defaults'][method]?.[isAdapter ? 'adapter' : 'full'] ?? {};
  const fields = readGroups(schema).flatMap((group) => group.fields);
  return new Map(
    fields.map((field) => [field.name, field.name in defaults ? { ...field, fallback: defaults[field.name] } : field]),
  );
}

/**
 * Fields by name, with the defaults of the method of a configuration.
 * @param {any} schema @param {Record<string, any>} config
 */
export function readFieldsOfConfig(schema, config) {
  const method = String(config.method ?? schema.properties.method.default);
  return readFields(schema, method, config.lora_r !== null);
}

/**
 * @param {string} name @param {any} property @param {Record<string, any>} definitions
 * @returns {FormField}
 */
export function readField(name, property, definitions) {
  const resolve = (/** @type {any} */ definition) =>
    definition.$ref ? { ...definitions[definition.$ref.split('/').pop()], ...definition } : definition;
  const flattenUnion = (/** @type {any} */ union) => {
    const resolved = resolve(union);
    return (resolved.anyOf ?? resolved.oneOf)?.flatMap(flattenUnion) ?? [resolved];
  };
  const leaves = flattenUnion(property);
  const isNullable = leaves.some((/** @type {any} */ definition) => definition.type === 'null');
  const alternatives = leaves.filter((/** @type {any} */ definition) => definition.type !== 'null');
  const main = alternatives[0] ?? {};
  const field = {
    name,
    description: property.description ?? main.description ?? '',
    fallback: 'default' in property ? property.default : readObjectDefault(main),
    isNullable,
    choices: /** @type {string[]} */ ([]),
    min: main.minimum ?? main.exclusiveMinimum,
    max: main.maximum ?? main.exclusiveMaximum,
  };
  if (alternatives.length === 1) {
    const choices = main.enum ?? (main.const === undefined ? null : [main.const]);
    if (choices && choices.every((/** @type {unknown} */ choice) => typeof choice === 'string'))
      return { ...field, kind: 'choice', choices };
    if (main.type === 'boolean') return { ...field, kind: 'boolean' };
    if (main.type === 'integer') return { ...field, kind: 'integer' };
    if (main.type === 'number') return { ...field, kind: 'number' };
    if (main.type === 'string') return { ...field, kind: 'text' };
    if (main.type === 'array' && resolve(main.items ?? {}).type === 'string') return { ...field, kind: 'list' };
  }
  const isScalar = (/** @type {any} */ definition) =>
    ['integer', 'number', 'string'].includes(definition.type) || typeof definition.const === 'string';
  return { ...field, kind: alternatives.length > 1 && alternatives.every(isScalar) ? 'amount' : 'json' };
}

/**
 * Default of an object whose fields all have one; undefined for others.
 * @param {any} definition
 */
function readObjectDefault(definition) {
  const fields = Object.entries(definition.properties ?? {});
  if (fields.length === 0 || !fields.every(([, field]) => 'default' in field)) return undefined;
  return Object.fromEntries(fields.map(([name, field]) => [name, field.default]));
}

/**
 * True for values that are the same, whatever the order of their fields; null and nothing at all are.
 * @param {unknown} left @param {unknown} right
 */
export function areEqual(left, right) {
  const sortFields = (/** @type {string} */ _name, /** @type {any} */ value) =>
    value !== null && typeof value === 'object' && !Array.isArray(value)
      ? Object.fromEntries(Object.entries(value).toSorted(([leftName], [rightName]) => (leftName < rightName ? -1 : 1)))
      : value;
  return JSON.stringify(left ?? null, sortFields) === JSON.stringify(right ?? null, sortFields);
}

/**
 * True for a value that the field has anyway.
 * @param {FormField | undefined} field @param {unknown} value
 */
export function isDefault(field, value) {
  if (field?.fallback == null) return value == null || (typeof value === 'object' && Object.keys(value).length === 0);
  return areEqual(value, field.fallback);
}

/** Text for no value, where the default is a value. */
export const NONE = 'none';

/**
 * Text of a value in its control; empty for a field that is not set.
 * @param {FormField} field @param {unknown} value
 */
export function formatValue(field, value) {
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
export function parseValue(field, text) {
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
 * @param {Record<string, unknown>} values Fields of the request beside the configuration; null or empty ones are left
 *   out.
 * @param {Record<string, unknown>} config Fields of the configuration that were set.
 */
export function buildRequest(values, config) {
  const isSet = (/** @type {[string, unknown]} */ [, value]) =>
    value != null && value !== '' && !(Array.isArray(value) && value.length === 0);
  return { ...Object.fromEntries(Object.entries(values).filter(isSet)), config };
}

/**
 * YAML of a request, for `anneal run`. Texts are quoted as in JSON, which YAML includes.
 * @param {Record<string, any>} fields @param {number} [depth]
 * @returns {string}
 */
export function formatYaml(fields, depth = 0) {
  const indent = '  '.repeat(depth);
  return Object.entries(fields)
    .map(([name, value]) => {
      const isNested =
        value !== null && typeof value === 'object' && !Array.isArray(value) && Object.keys(value).length > 0;
      return isNested
        ? `${indent}${name}:\n${formatYaml(value, depth + 1)}`
        : `${indent}${name}: ${JSON.stringify(value)}\n`;
    })
    .join('');
}

/**
 * Command that sends a request.
 * @param {string} origin @param {unknown} body
 */
export function formatCurl(origin, body) {
  // In single quotes a shell changes nothing; a quote itself is written outside of them.
  const json = JSON.stringify(body, null, 2).replaceAll("'", `'\\''`);
  return [
    `curl -X POST ${origin}/v1/runs`,
    `-H "Authorization: Bearer $ANNEAL_API_KEY"`,
    `-H "Content-Type: application/json"`,
    `-d '${json}'`,
  ].join(' \\\n  ');
}
