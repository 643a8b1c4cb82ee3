// The page's frame: views, theme, the server's state in the header.

import "uplot/dist/uPlot.min.css";
import "./style.css";
import { ApiFailure, type Stats } from "./api";
import { Chat } from "./chat";
import { byId } from "./dom";
import { Feed } from "./feed";
import { Live } from "./live";
import { Settings } from "./settings";
import { installTheme } from "./theme";

const VIEWS = ["chat", "live"] as const;
type View = (typeof VIEWS)[number];

function show(view: View): void {
  for (const name of VIEWS) {
    const tab = byId(`tab-${name}`);
    const chosen = name === view;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    byId(`view-${name}`).hidden = !chosen;
  }
  if (view === "live") live.shown();
}

function state(stats: Stats): [string, string] {
  if (stats.draining) return ["draining", "warn"];
  if (stats.seconds_since_progress > 10 && stats.running) return ["no progress", "bad"];
  return [stats.running ? "busy" : "ready", "good"];
}

function tellState(text: string, kind: string): void {
  const status = byId("status");
  if (status.dataset["kind"] === kind && status.lastElementChild!.textContent === text) return;
  status.dataset["kind"] = kind;
  status.lastElementChild!.textContent = text;
}

const settings = new Settings(byId("settings"));
const live = new Live();
new Chat(settings);

new Feed(
  (stats) => {
    tellState(...state(stats));
    live.take(stats);
  },
  (error) => {
    const locked = error instanceof ApiFailure && error.status === 401;
    tellState(locked ? "needs an API key" : "no answer", locked ? "warn" : "bad");
    if (locked) settings.askForKey();
    live.lost();
  },
).start();

for (const name of VIEWS) {
  const tab = byId(`tab-${name}`);
  tab.addEventListener("click", () => (location.hash = name));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = VIEWS[(VIEWS.indexOf(name) + 1) % VIEWS.length]!;
    location.hash = other;
    byId(`tab-${other}`).focus();
  });
}
const followHash = () => show(location.hash === "#live" ? "live" : "chat");
addEventListener("hashchange", followHash);
installTheme(byId("theme"), () => live.redraw());
followHash();
