//! Wake-ups on one server: which messages a waiter trusts, what becomes of a broken subscription,
//! how often it polls.

use std::time::{Duration, Instant};

use redlatch::deadpool_redis::{Config, Runtime};
use redlatch::{Error, Locks, Mutex, MutexGuard, Options, Wakeups};
use tokio::task::JoinHandle;

use crate::support::{Proxy, Server, count_waiters, eventually, queued, soon};

const QUEUE: &str = "{lock:x}:waiters";

/// A client whose requests and whose subscription pass through proxies of their own.
struct Client {
    requests: Proxy,
    messages: Proxy,
    locks: Locks,
}

impl Client {
    async fn of(server: &Server) -> Client {
        let requests = Proxy::start(server.port()).await;
        let messages = Proxy::at("127.0.0.3", vec![server.port()]).await;
        let pool = Config::from_url(requests.url()).create_pool(Some(Runtime::Tokio1)).unwrap();
        // A reply that is held back is no failure.
        let options = Options::new().poll_cap(NEVER).node_timeout(NEVER);
        let builder = Locks::builder().pool(pool).subscriber(messages.url());
        let locks = builder.options(options).connect().await.unwrap();
        Client { requests, messages, locks }
    }

    /// Waits for the mutex, and is notified once it is granted.
    async fn waits(&self, server: &Server) -> JoinHandle<Result<MutexGuard, Error>> {
        let mutex = self.locks.mutex("x").unwrap();
        if server.subscribers().await.is_empty() {
            // The first one to wait subscribes. On a busy machine it polls until that is done.
            assert!(mutex.lock_timeout(Duration::from_millis(100)).await.is_err());
            eventually("subscribed", || async { server.subscribers().await.len() == 1 }).await;
            eventually("it left the queue", || async { server.queues().await.is_empty() }).await;
        }
        wait_in_queue(server, mutex).await
    }

    /// Ends the subscription, and waits until there is another one.
    async fn subscribes_again(&self, server: &Server) {
        let before = server.subscribers().await;
        self.messages.cut();
        eventually("another subscription", || async {
            let now = server.subscribers().await;
            now.len() == 1 && now != before
        })
        .await;
    }

    /// The proxies outlive the client, which would try in vain to reach its server.
    async fn end(self) {
        drop(self.locks);
        self.requests.outlive_clients().await;
        self.messages.outlive_clients().await;
    }
}

/// No waiter sleeps for that long: it polls after half a claim, which is a second and a half at
/// most.
const NEVER: Duration = Duration::from_secs(10);

async fn wait_in_queue(server: &Server, mutex: Mutex) -> JoinHandle<Result<MutexGuard, Error>> {
    let count = count_waiters(QUEUE);
    queued(async || vec![server.run(&count).await], async move { mutex.lock().await }).await
}

/// Behind another connection there may be another server, with another clock: a message is dated by
/// the clock that was seen through the connection before, so the waiter asks.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_not_trusted_after_the_connection_for_requests_was_replaced() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let client = Client::of(&server).await;
    // The server knows the script that releases from here on: one release is one script.
    holder.lock().await.unwrap().release().await.unwrap();
    let guard = holder.lock().await.unwrap();
    let waiting = client.waits(&server).await;
    client.requests.cut();
    // Any request finds out, and is sent on another connection.
    assert!(!client.locks.mutex("other").unwrap().is_locked().await.unwrap());
    let before = server.scripts_run().await;
    guard.release().await.unwrap();
    let next = soon("granted", waiting).await.unwrap().unwrap();
    // If the waiter polls while this test is slow, that is a look as well.
    assert!(server.scripts_run().await >= before + 2, "a release, and the look that follows the message");
    next.release().await.unwrap();
    client.end().await;
    drop(holder);
    server.assert_nothing_left().await;
}

/// A look is under way while the subscription is replaced: the message comes on another one than
/// that which was there when the look began, perhaps from another server.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_not_trusted_after_the_subscription_was_replaced() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let client = Client::of(&server).await;
    // The server knows the script that releases from here on: one release is one script.
    holder.lock().await.unwrap().release().await.unwrap();
    let guard = holder.lock().await.unwrap();
    let waiting = client.waits(&server).await;
    let before = server.scripts_run().await;
    client.requests.hold_replies(true);
    // Once it is subscribed again, it looks, and its answer is held back: the lock is busy.
    client.subscribes_again(&server).await;
    eventually("it looks", || async { server.scripts_run().await > before }).await;
    client.subscribes_again(&server).await;
    let before = server.scripts_run().await;
    guard.release().await.unwrap();
    client.requests.hold_replies(false);
    let next = soon("granted", waiting).await.unwrap().unwrap();
    assert!(server.scripts_run().await >= before + 2, "a release, and the look that follows the message");
    next.release().await.unwrap();
    client.end().await;
    drop(holder);
    server.assert_nothing_left().await;
}

/// A message that is published meanwhile is lost, so all waiters look as soon as there is a
/// subscription again.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_look_as_soon_as_a_broken_subscription_is_made_again() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let client = Client::of(&server).await;
    let (mut subscribed, mut granted) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let guard = holder.lock().await.unwrap();
        let waiting = client.waits(&server).await;
        client.messages.be_deaf(true);
        client.messages.cut();
        let start = Instant::now();
        eventually("no subscription", || async { server.subscribers().await.is_empty() }).await;
        guard.release().await.unwrap();
        client.messages.be_deaf(false);
        client.messages.cut(); // a connection that was made meanwhile is never answered
        eventually("subscribed again", || async { server.subscribers().await.len() == 1 }).await;
        subscribed.push(start.elapsed());
        let start = Instant::now();
        let next = soon("granted", waiting).await.unwrap().unwrap();
        granted.push(start.elapsed());
        next.release().await.unwrap();
    }
    subscribed.sort();
    granted.sort();
    // A silent subscription is asked after five seconds whether it is still there; this one has
    // said that it is not.
    assert!(subscribed[2] < Duration::from_secs(2), "{subscribed:?}");
    // A waiter polls after more than a second.
    assert!(granted[2] < Duration::from_millis(500), "{granted:?}");
    client.end().await;
    drop(holder);
    server.assert_nothing_left().await;
}

/// How long a waiter sleeps between two polls at the least, by the marks that each poll leaves, on
/// the server's clock.
async fn pause(server: &Server, options: Options) -> Duration {
    let holder = server.locks().await.mutex("x").unwrap();
    let guard = holder.lock().await.unwrap();
    let locks = server.locks_with(options).await;
    let waiting = wait_in_queue(server, locks.mutex("x").unwrap()).await;
    let mut marks: Vec<u64> = Vec::new();
    while marks.len() < 6 {
        // Beyond all waiters; how far is when the mark expires, in microseconds.
        let marked: Vec<(String, f64)> =
            server.run(&["ZRANGEBYSCORE", QUEUE, "4503599627370496", "+inf", "WITHSCORES"]).await;
        let seen = marked.iter().find(|(mark, _)| mark.starts_with("seen "));
        let time = seen.map(|(_, score)| *score as u64 - (1 << 52));
        marks.extend(time.filter(|time| marks.last() != Some(time)));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    waiting.abort();
    guard.release().await.unwrap();
    drop((holder, locks));
    server.assert_nothing_left().await;
    let shortest = marks.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap();
    Duration::from_micros(shortest)
}

/// The shortest of several pauses: a busy machine makes them longer, and only a mistake makes all
/// of them so.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_poll_every_poll_cap_or_half_claim() {
    let server = Server::start().await;
    let millis = Duration::from_millis;
    let options = || Options::new().ttl(millis(900));
    let notified = || options().wakeups(Wakeups::Push);
    let polling = || options().wakeups(Wakeups::Poll);
    for (what, options, least, most) in [
        ("notified", notified().poll_cap(NEVER), 337, 600),
        ("notified, with a cap", notified().poll_cap(millis(80)), 60, 300),
        ("polling", polling().poll_cap(NEVER), 75, 300),
        ("polling, with a cap", polling().poll_cap(millis(20)), 15, 60),
    ] {
        let pause = pause(&server, options).await;
        println!("FIG {what}: {pause:?}");
        // Each waiter takes up to a quarter off the cap or off half the claim. After a whole claim,
        // the first one would pause for 675 ms at the least.
        assert!(pause >= millis(least), "{what}: {pause:?}");
        assert!(pause < millis(most), "{what}: {pause:?}");
    }
}

/// What a user sends that may publish and read the queue: to the channel of the only waiter, that
/// it holds the mutex now.
async fn forged(server: &Server) -> (String, String) {
    let queue: Vec<String> = server.run(&["ZRANGE", QUEUE, "0", "0"]).await;
    let words: Vec<&str> = queue[0].split(' ').collect();
    let (attempt, channel) = (words[0], words[3]);
    let time: Vec<u64> = server.run(&["TIME"]).await;
    let time = time[0] * 1_000_000 + time[1];
    (channel.to_owned(), format!("{attempt} 999999 {time} lock:x"))
}

async fn publish(server: &Server, (channel, message): &(String, String)) {
    assert_eq!(server.run::<i64>(&["PUBLISH", channel, message]).await, 1);
}

/// A waiter whose client has subscribed, and which has seen the server's clock.
async fn notified(server: &Server, locks: &Locks) -> JoinHandle<Result<MutexGuard, Error>> {
    let mutex = locks.mutex("x").unwrap();
    assert!(mutex.lock_timeout(Duration::from_millis(200)).await.is_err());
    eventually("subscribed", || async { server.subscribers().await.len() == 1 }).await;
    eventually("it left the queue", || async { server.queues().await.is_empty() }).await;
    wait_in_queue(server, mutex).await
}

/// The trust boundary.
#[tokio::test(flavor = "multi_thread")]
async fn a_forged_message_is_believed_until_the_first_renewal() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let guard = holder.lock().await.unwrap();
    let trusting = server.locks_with(Options::new().poll_cap(NEVER)).await;
    let waiting = notified(&server, &trusting).await;
    // Its first look may be under way still: without a date, a message is not believed.
    let deceived = soon("deceived", async {
        while !waiting.is_finished() {
            if let [_, ..] = server.run::<Vec<String>>(&["ZRANGE", QUEUE, "0", "0"]).await.as_slice() {
                let (channel, message) = forged(&server).await;
                let _: i64 = server.run(&["PUBLISH", &channel, &message]).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        waiting.await.unwrap().unwrap()
    });
    let deceived = deceived.await;
    assert!(!guard.lease().is_lost());
    soon("its first renewal finds out", deceived.lease().lost()).await;
    drop((deceived, trusting, guard, holder));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_message_is_not_believed_where_notifications_are_verified() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let guard = holder.lock().await.unwrap();
    let careful = server.locks_with(Options::new().poll_cap(NEVER).wakeups(Wakeups::Verify)).await;
    let mut waiting = notified(&server, &careful).await;
    for _ in 0..20 {
        let forged = forged(&server).await;
        let before = server.scripts_run().await;
        publish(&server, &forged).await;
        eventually("it polls", || async { server.scripts_run().await > before }).await;
    }
    assert!(tokio::time::timeout(Duration::from_millis(100), &mut waiting).await.is_err());
    // It hears of the release all the same: by itself it polls after more than a second.
    let start = Instant::now();
    guard.release().await.unwrap();
    let next = soon("granted", waiting).await.unwrap().unwrap();
    println!("FIG verified after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(server.run::<i64>(&["EXISTS", "lock:x"]).await, 1);
    next.release().await.unwrap();
    drop((holder, careful));
    server.assert_nothing_left().await;
}

/// Whoever publishes can make waiters poll, but not more often than ten times a second.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_messages_causes_ten_polls_a_second() {
    let server = Server::start().await;
    let holder = server.locks_with(Options::new().ttl(Duration::from_secs(60))).await.mutex("x").unwrap();
    let guard = holder.lock().await.unwrap();
    let locks = server.locks_with(Options::new().poll_cap(NEVER)).await;
    let waiting = notified(&server, &locks).await;
    let (channel, message) = forged(&server).await;
    // No date: it is not believed.
    let message = message.replace(" 999999 ", " none ");
    let (before, start) = (server.scripts_run().await, Instant::now());
    let mut publisher = server.connection().await;
    let mut sent = 0;
    // Faster, and the server ends the subscription for want of memory.
    let mut pace = tokio::time::interval(Duration::from_millis(10));
    while start.elapsed() < Duration::from_secs(3) {
        pace.tick().await;
        let mut many = redis::pipe();
        (0..50).for_each(|_| _ = many.cmd("PUBLISH").arg(&channel).arg(&message));
        many.query_async::<()>(&mut publisher).await.unwrap();
        sent += 50;
    }
    let polls = server.scripts_run().await - before;
    let seconds = start.elapsed().as_secs_f64();
    println!("FIG {polls} scripts for {sent} messages in {seconds:.1} s");
    assert!(sent > 2_000, "{sent}");
    assert!(polls >= 10, "it is a hint that something changed: {polls}");
    assert!((polls as f64) <= 10.0 * seconds, "{polls} in {seconds} s");
    let start = Instant::now();
    guard.release().await.unwrap();
    let next = soon("granted", waiting).await.unwrap().unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    next.release().await.unwrap();
    drop((holder, locks));
    server.assert_nothing_left().await;
}
