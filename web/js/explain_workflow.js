/** Explain this workflow: says what Run on several GPUs would do with each loader of a diffusion model, and changes nothing. */
import { look, say, sayOthers } from "./loaders.js";
import { size } from "./size.js";

export const EXPLAIN = "ParallelDiT.ExplainWorkflow";
export const EXPLAIN_TITLE = "Explain this workflow";
const SECONDS = 60; // to read it

/** What would become of a loader. */
function said({ name, weights, pipefusion }, cards) {
    const where = cards.map((card) => `${card.name} (${size(card.memory)})`).join(", ");
    const exact = "every step equals that of one GPU";
    const banded =
        `Apply PipeFusion would be added too, because ${pipefusion}: its first step is exact, and the others are close. ` +
        "warmup_steps makes more of them exact";
    const how = pipefusion ? banded : exact;
    return `${name}: ${size(weights)} of weights on ${where}. Parallelize Model would split each image over the GPUs; ${how}.`;
}

export async function explain() {
    const found = await look(EXPLAIN_TITLE);
    if (!found) return;
    for (const each of found.decided.filter(({ takes }) => takes)) {
        say(EXPLAIN_TITLE, "info", said(each, found.cards), SECONDS);
    }
    sayOthers(EXPLAIN_TITLE, found, "Would not be changed", "info", SECONDS);
}
