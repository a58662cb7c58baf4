/** Bytes as text: 1.2 GB, or 350 MB below 1 GB. */
export const size = (bytes) => (bytes < 1e9 ? `${Math.round(bytes / 1e6)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);
