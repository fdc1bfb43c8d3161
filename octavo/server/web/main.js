// Puts the page together: the two views, the model, the key, and the keyboard.

import { Api } from "./api.js";
import { ChatView } from "./chat.js";
import { byId, h, keep, kept, showBanner } from "./dom.js";
import { EngineView } from "./engine.js";

const RETRY_MS = 2000;

/** The models of the server, and the one that is chosen. */
class ModelChoice {
  constructor(api) {
    this.api = api;
    this.select = byId("model");
    this.name = "";
    this.select.addEventListener("change", () => this.use(this.select.value));
    this.onchange = () => {};
  }

  /** Asks until the server has a model: it may still be loading, or wait for one. */
  async load() {
    for (;;) {
      try {
        const { data } = await this.api.json("v1/models");
        showBanner(data.length ? "" : "No model is loaded.");
        if (data.length) {
          this.show(data);
          return;
        }
      } catch (error) {
        showBanner(error.status ? error.message : "The server cannot be reached.");
        if (error.status === 401) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  /** Offers the models that can be asked; others are named with their state. */
  show(cards) {
    const isReady = ({ state = "ready" }) => state === "ready";
    const options = cards.map((card) =>
      h("option", { value: card.id, disabled: !isReady(card) }, isReady(card) ? card.id : `${card.id} (${card.state})`),
    );
    this.select.replaceChildren(...options);
    const names = cards.filter(isReady).map((card) => card.id);
    const before = kept("model", "");
    this.use(names.includes(before) ? before : (names[0] ?? cards[0].id));
  }

  async use(name) {
    this.name = name;
    this.select.value = name;
    keep("model", name);
    await this.onchange(name);
  }
}

class Page {
  constructor() {
    this.api = new Api();
    this.model = new ModelChoice(this.api);
    this.chat = new ChatView(this.api, this.model);
    this.engine = new EngineView(this.api, this.model);
    byId("key-button").hidden = !this.api.key;
    byId("key-button").addEventListener("click", () => this.changeKey());
    byId("help-button").addEventListener("click", () => byId("help-dialog").showModal());
    addEventListener("hashchange", () => this.go());
    addEventListener("keydown", (event) => this.press(event));
    this.model.onchange = (name) => this.changeModel(name);
  }

  async start() {
    const isRecording = new URLSearchParams(location.search).has("recording");
    if (isRecording) {
      for (const link of document.querySelectorAll('[data-view="chat"], .model-choice')) link.hidden = true;
      location.hash = "#engine";
      this.engine.showRecording();
    }
    this.go();
    if (!isRecording) await this.model.load();
  }

  /** Shows the view that the address names. */
  go() {
    const name = location.hash === "#engine" ? "engine" : "chat";
    for (const view of ["chat", "engine"]) byId(view).hidden = view !== name;
    for (const link of document.querySelectorAll("[data-view]")) {
      if (link.dataset.view === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = name === "engine" ? "Engine · Octavo" : "Octavo";
    if (name === "engine") this.engine.enter();
    else this.engine.leave();
    if (name === "chat") this.chat.focus();
  }

  async changeModel(name) {
    try {
      const query = new URLSearchParams({ model: name });
      const { fields, features } = await this.api.json(`v1/capabilities?${query}`);
      this.chat.settings.use(fields, features);
    } catch (error) {
      this.chat.settings.use([]);
      if (error.status !== 404) showBanner(error.message);
    }
    this.engine.modelChanged();
  }

  async changeKey() {
    if (await this.api.askForKey()) await this.model.load();
  }

  press(event) {
    const writes = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.chat.stop();
    if (writes || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/" && !byId("chat").hidden) {
      event.preventDefault();
      this.chat.focus();
    } else if (!byId("engine").hidden) {
      this.engine.press(event);
    }
  }
}

new Page().start();
