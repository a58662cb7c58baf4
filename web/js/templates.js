/** The pack's templates in the order of their numbers. ComfyUI lists them in the order of the file system. */
import { api } from "../../../scripts/api.js";

const PACK = decodeURIComponent(new URL(import.meta.url).pathname.split("/").at(-3));
const list = api.getWorkflowTemplates.bind(api);

api.getWorkflowTemplates = async () => {
    const templates = await list();
    templates[PACK]?.sort();
    return templates;
};
