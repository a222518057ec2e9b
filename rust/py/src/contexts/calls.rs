//! `Calls`: the calls of a module that run, with what each knows.

use std::thread::{ThreadId, current};

/// Calls that run, inner ones after outer ones. A request may run on several threads at once.
pub struct Calls<T>(Vec<(ThreadId, T)>);

impl<T> Default for Calls<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Calls<T> {
    /// Begins a call on this thread.
    pub fn begin(&mut self, call: T) {
        self.0.push((current().id(), call));
    }

    /// Ends the innermost call on this thread.
    pub fn end(&mut self) -> Option<T> {
        let call = self.on_this_thread()?;
        Some(self.0.remove(call).1)
    }

    /// The innermost call on this thread.
    pub fn innermost(&mut self) -> Option<&mut T> {
        let call = self.on_this_thread()?;
        Some(&mut self.0[call].1)
    }

    /// The call around the innermost one on this thread.
    pub fn around(&self) -> Option<&T> {
        let inner = self.on_this_thread()?;
        let outer = self.0[..inner]
            .iter()
            .rfind(|(its, _)| *its == current().id());
        outer.map(|(_, call)| call)
    }

    /// The innermost call, if all are on one thread, which may not be this one: a forward may share
    /// its work out.
    pub fn only(&mut self) -> Option<&mut T> {
        let (thread, _) = self.0.first()?;
        let one = self.0.iter().all(|(its, _)| its == thread);
        one.then(|| self.0.last_mut())?.map(|(_, call)| call)
    }

    fn on_this_thread(&self) -> Option<usize> {
        let thread = current().id();
        self.0.iter().rposition(|(its, _)| *its == thread)
    }
}
