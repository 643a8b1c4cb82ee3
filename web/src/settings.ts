// The parameters of a chat request, kept in this browser from one visit to the next.

import { apiKey, getJson, setApiKey } from "./api";
import { el } from "./dom";

const STORED = "castiron.settings";
const EXAMPLE_SCHEMA = JSON.stringify(
  {
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer", minimum: 0 } },
    required: ["name", "age"],
    additionalProperties: false,
  },
  null,
  2,
);

interface NumberField {
  name: string;
  label: string;
  min: number;
  max: number;
  step: number;
  /** What the server takes where nothing is given. */
  placeholder: string;
}

const NUMBERS: NumberField[] = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, placeholder: "model's" },
  { name: "top_p", label: "Top-p", min: 0.01, max: 1, step: 0.01, placeholder: "model's" },
  { name: "top_k", label: "Top-k", min: 0, max: 100000, step: 1, placeholder: "model's" },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01, placeholder: "off" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 2, step: 0.01, placeholder: "off" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, placeholder: "0" },
  { name: "max_completion_tokens", label: "Longest answer", min: 1, max: 1e6, step: 1, placeholder: "what fits" },
  { name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, placeholder: "drawn" },
];

export class Settings {
  private readonly model = el("select", { id: "model" });
  private readonly system = el("textarea", { id: "system", rows: 3, placeholder: "You are a helpful assistant." });
  private readonly numbers = new Map<string, HTMLInputElement>();
  private readonly stop = el("input", { id: "stop-strings", placeholder: "none; several by commas" });
  private readonly format = el(
    "select",
    { id: "format" },
    el("option", { value: "text" }, "Text"),
    el("option", { value: "json_object" }, "Any JSON object"),
    el("option", { value: "json_schema" }, "JSON by a schema"),
  );
  private readonly schema = el("textarea", { id: "schema", rows: 10, spellcheck: false, className: "mono" });
  private readonly schemaError = el("p", { className: "field-error", id: "schema-error", role: "alert" });
  private readonly key = el("input", { id: "api-key", type: "password", autocomplete: "off", placeholder: "none" });
  private readonly keyField = field("API key", this.key);
  private readonly schemaField = el("div", { className: "field" }, label("Schema", this.schema), this.schema, this.schemaError);

  constructor(root: HTMLElement) {
    const numbers = NUMBERS.map((n) => {
      const input = el("input", { id: n.name, type: "number", placeholder: n.placeholder });
      Object.assign(input, { min: String(n.min), max: String(n.max), step: String(n.step) });
      this.numbers.set(n.name, input);
      return field(n.label, input);
    });
    this.schema.setAttribute("aria-describedby", "schema-error");
    root.append(
      field("Model", this.model),
      field("System prompt", this.system),
      el("div", { className: "pair" }, ...numbers),
      field("Stop strings", this.stop),
      field("Answer format", this.format),
      this.schemaField,
      this.keyField,
      el("button", { type: "button", className: "quiet", id: "reset", onclick: () => this.reset() }, "Defaults"),
    );
    this.restore();
    this.key.value = apiKey();
    this.key.addEventListener("change", () => {
      setApiKey(this.key.value.trim());
      void this.listModels();
    });
    root.addEventListener("input", () => this.changed());
    this.changed();
    void this.listModels();
  }

  /** Show that the server wants a key. */
  askForKey(): void {
    this.keyField.classList.add("wanted");
  }

  get systemPrompt(): string {
    return this.system.value.trim();
  }

  /** Whether answers are JSON. */
  get json(): boolean {
    return this.format.value !== "text";
  }

  /** Fields of the request; throws an Error that says which setting is wrong. */
  fields(): Record<string, unknown> {
    const fields: Record<string, unknown> = {};
    if (this.model.value) fields["model"] = this.model.value;
    for (const n of NUMBERS) {
      const input = this.numbers.get(n.name)!;
      if (!input.value && !input.validity.badInput) continue;
      if (!input.checkValidity()) throw new Error(`${n.label}: ${input.validationMessage}`);
      fields[n.name] = Number(input.value);
    }
    const stops = this.stop.value.split(",").filter(Boolean).map((text) => text.replaceAll("\\n", "\n"));
    if (stops.length) fields["stop"] = stops;
    if (this.format.value === "json_object") fields["response_format"] = { type: "json_object" };
    if (this.format.value === "json_schema") {
      const schema = this.parsedSchema();
      if (schema === undefined) throw new Error("The schema is no JSON");
      fields["response_format"] = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
    }
    return fields;
  }

  private parsedSchema(): unknown {
    try {
      const schema: unknown = JSON.parse(this.schema.value);
      this.schemaError.textContent = "";
      return schema;
    } catch (error) {
      this.schemaError.textContent = `No JSON: ${(error as Error).message}`;
      return undefined;
    }
  }

  private async listModels(): Promise<void> {
    try {
      const { data } = await getJson<{ data: { id: string }[] }>("v1/models");
      this.model.replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
      this.keyField.classList.remove("wanted");
    } catch {
      // The header tells that the server does not answer, or wants a key.
    }
  }

  private inputs(): (HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement)[] {
    return [this.system, ...this.numbers.values(), this.stop, this.format, this.schema];
  }

  private changed(): void {
    const bySchema = this.format.value === "json_schema";
    this.schemaField.hidden = !bySchema;
    if (bySchema) this.parsedSchema();
    localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(this.inputs().map((i) => [i.id, i.value]))));
  }

  private restore(): void {
    let stored: Record<string, string> = {};
    try {
      stored = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    } catch {
      // what an older page left
    }
    this.schema.value = EXAMPLE_SCHEMA;
    for (const input of this.inputs()) {
      if (typeof stored[input.id] === "string") input.value = stored[input.id]!;
    }
  }

  private reset(): void {
    for (const input of this.inputs()) input.value = "";
    this.format.value = "text";
    this.schema.value = EXAMPLE_SCHEMA;
    this.changed();
  }
}

function label(text: string, input: HTMLElement): HTMLLabelElement {
  return el("label", { htmlFor: input.id }, text);
}

function field(text: string, input: HTMLElement): HTMLElement {
  return el("div", { className: "field" }, label(text, input), input);
}
