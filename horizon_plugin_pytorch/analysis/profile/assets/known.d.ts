/**
 * What `page.py` writes before the first file: texts by language and key, the acceptable error of each task, for each
 * function of similarity beyond which threshold an operator is said to lose accuracy, and from where a verdict is a bad one
 * (`tasks.py`).
 */
declare const KNOWN: {
  texts: Record<string, Record<string, string>>;
  tasks: Record<string, number>;
  metrics: Record<string, { threshold: number; higher_is_better: boolean }>;
  bounds: { error_bad: number; metric_watch: number; metric_bad: number };
};
