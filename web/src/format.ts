// Numbers as people read them.

export function count(value: number): string {
  return Math.round(value).toLocaleString("en-US");
}

/** Three significant digits, with k and M for large numbers. */
export function short(value: number): string {
  if (!Number.isFinite(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  if (value >= 100) return count(value);
  if (value === 0) return "0";
  return value >= 10 ? value.toFixed(1) : value.toPrecision(2);
}

/** A value of an axis: round numbers, as short as they can be. */
export function tick(value: number): string {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  return value >= 1e4 ? `${+(value / 1e3).toPrecision(3)}k` : `${+value.toPrecision(3)}`;
}

export function percent(part: number, whole: number): string {
  return whole > 0 ? `${((part / whole) * 100).toFixed(part && part < whole / 10 ? 1 : 0)}%` : "–";
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
}

export function milliseconds(seconds: number): string {
  return seconds < 1e-3 ? `${(seconds * 1e6).toFixed(0)} µs` : `${short(seconds * 1e3)} ms`;
}

export function duration(seconds: number): string {
  const [d, h, m] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}
