// Bundles the page:  node build.mjs OUTPUT_FOLDER
// Packages are looked for in NODE_PATH too, so that a build leaves nothing in the source tree.
import { copyFile, mkdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2];
if (!out) throw new Error("usage: node build.mjs OUTPUT_FOLDER");

// An import would look beside this file alone; require goes by NODE_PATH as well.
const { build } = createRequire(import.meta.url)("esbuild");

await mkdir(out, { recursive: true });
await build({
  entryPoints: { app: join(here, "src", "main.ts") },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  legalComments: "eof",
  logLevel: "warning",
});
await copyFile(join(here, "src", "index.html"), join(out, "index.html"));
await copyFile(join(here, "src", "icon.svg"), join(out, "icon.svg"));
