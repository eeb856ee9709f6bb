// What a test started is stopped in reverse order: the router before the engines behind it. Every
// step runs even when one fails; the first failure fails the test.
const stacks = new WeakMap();

export function cleanup(t, step) {
  let stack = stacks.get(t);
  if (!stack) {
    stack = [];
    stacks.set(t, stack);
    t.after(async () => {
      let failure;
      while (stack.length) {
        try {
          await stack.pop()();
        } catch (error) {
          // shown here too: a runner reports only the first failure of a test, which may be no more
          // than a consequence of this one
          console.error(error.message);
          failure ??= error;
        }
      }
      if (failure) throw failure;
    });
  }
  stack.push(step);
}
